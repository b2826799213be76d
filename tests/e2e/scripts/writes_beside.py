"""Writes where its code is, and where the test says, then waits for the word."""

import pathlib
import sys
import time

pathlib.Path("outputs").mkdir(exist_ok=True)
pathlib.Path("outputs/model.pt").write_text("weights")
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.05)
