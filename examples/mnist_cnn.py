"""A small CNN on MNIST: the whole of what a training script needs for Atoll. Also runs alone: python mnist_cnn.py."""

from __future__ import annotations

import argparse

import torch
from data import mnist
from torch import nn

import atoll


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=256, help="of the whole job")
    options = parser.parse_args()

    run = atoll.init(seed=1)
    train, test = mnist()
    model = nn.Sequential(
        *(nn.Conv2d(1, 32, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(64 * 7 * 7, 320), nn.ReLU(), nn.Dropout(0.2), nn.Linear(320, 10)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = run.prepare(model, optimizer, train, batch_size=options.batch_size)
    held_out = run.evaluation_loader(test, batch_size=1000)
    criterion = nn.CrossEntropyLoss()

    for epoch in run.epochs(options.epochs):
        model.train()
        for images, labels in loader:
            loss = criterion(model(images), labels)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.report(loss=loss.item())
        right = torch.zeros((), device=run.device)
        with run.evaluation():
            for images, labels in held_out:  # this worker's part of it
                right += (model(images).argmax(1) == labels).sum()
        (total,) = run.sum(right.item())
        accuracy = total / len(test)
        run.report(accuracy=accuracy)
        if run.is_main:
            print(f"epoch {epoch + 1}: test accuracy {accuracy:.2%}", flush=True)


if __name__ == "__main__":
    main()
