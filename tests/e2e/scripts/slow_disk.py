"""A disk that takes its time for each piece of a checkpoint that it is given."""

import os
import time

_write = os.write


def install(seconds: float) -> None:
    def slow(file, data):
        if ".writing-" in os.readlink(f"/proc/self/fd/{file}"):
            time.sleep(seconds)  # the disk's own pace, not a wait for anything
        return _write(file, data)

    os.write = slow
