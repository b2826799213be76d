"""Ways for a user's script to go wrong, without torch so that they go wrong fast."""

import os
import sys
import time

rank = int(os.environ["RANK"])
match sys.argv[1]:
    case "raise":
        raise ValueError(f"rank {rank} does not like its input")
    case "garbage":
        sys.stdout.buffer.write(bytes(range(256)) * 64)
        print("\nafter the garbage", flush=True)
    case "flood":
        line = b"x" * 1023 + b"\n"
        for _ in range(100 * 1024):
            sys.stdout.buffer.write(line)
        print("after the flood", flush=True)
    case "sleep":
        time.sleep(float(sys.argv[2]))
