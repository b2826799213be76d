"""What an adapter cannot train as the framework would have, it says before the first step."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from zmq_agent import Start

pytestmark = pytest.mark.timeout(300)

REFUSED = Path(__file__).with_name("refused.py")


@pytest.mark.parametrize(
    ("adapter", "library", "said"),
    [
        (
            "lightning",
            "pytorch_lightning",
            {
                "two loaders": "the adapter takes one training loader, made once",
                "no DataLoader": "the training loader is a Stream; the adapter takes a DataLoader",
                "stream": "the adapter does not take a training set without a length",
                "ckpt_path": "a run goes on from Atoll's checkpoints: leave ckpt_path out",
                "16-mixed": "16-mixed is not taken",
                "endless": "the adapter needs max_epochs or max_steps",
            },
        ),
        (
            "huggingface",
            "transformers",
            {
                "accumulation": "the adapter does not take gradient_accumulation_steps above 1",
                "two GPUs": "the Trainer would use 2 GPUs in this process",
                "fp16": "the adapter does not take fp16",
                "other devices": "Accelerate trains on meta and Atoll on cpu",
                "processes": "Accelerate has 2 processes of its own",
                "smaller batches": "the Trainer ends its epoch after as many batches as it would have itself",
                "too late": "Accelerate has looked at its environment already",
            },
        ),
        (
            "accelerate",
            "accelerate",
            {
                "accumulation": "the adapter does not take gradient_accumulation_steps above 1",
                "too late": "Accelerate has looked at its environment already",
            },
        ),
    ],
)
def test_what_an_adapter_refuses(
    tmp_path: Path, start: Start, adapter: str, library: str, said: dict[str, str]
) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not here: its adapter was NOT tested (make setup installs it)")
    env = {"PATH": "", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    with (tmp_path / "log").open("wb") as log:
        worker = start((sys.executable, str(REFUSED), adapter, str(tmp_path)), env, log)
    code, printed = worker.wait(280), (tmp_path / "log").read_text()
    assert code == 0, printed
    lines = (tmp_path / "refused").read_text().splitlines()
    refused = dict(line.split(": ", 1) for line in lines)
    assert refused.keys() == said.keys(), printed
    for case, words in said.items():
        assert refused[case].startswith(words)
