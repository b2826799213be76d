"""A small GAN on MNIST: two models with an optimizer each, in one run. Also runs alone: python mnist_gan.py."""

from __future__ import annotations

import argparse

import torch
from data import mnist
from torch import nn

import atoll

NOISE = 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=256, help="of the whole job")
    options = parser.parse_args()

    run = atoll.init(seed=1)
    train, test = mnist()
    generator = nn.Sequential(
        *(nn.Linear(NOISE, 256), nn.LeakyReLU(0.2), nn.Linear(256, 512), nn.LeakyReLU(0.2)),
        *(nn.Linear(512, 28 * 28), nn.Sigmoid(), nn.Unflatten(1, (1, 28, 28))),
    )
    discriminator = nn.Sequential(
        *(nn.Flatten(), nn.Linear(28 * 28, 256), nn.LeakyReLU(0.2), nn.Dropout(0.3)),
        *(nn.Linear(256, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1)),
    )
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    _, _, loader = run.prepare(
        (generator, discriminator), (optimizer_g, optimizer_d), train, batch_size=options.batch_size
    )

    def realness(images: torch.Tensor, real: bool) -> torch.Tensor:
        """The discriminator's loss on images that are all real, or all generated; []."""
        scores = discriminator(images)
        return nn.functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(real)))

    average = test.tensors[0].mean(dim=0).to(run.device)
    for epoch in run.epochs(options.epochs):
        for images, _ in loader:
            generated = generator(torch.randn(len(images), NOISE, device=run.device))

            optimizer_d.zero_grad()
            loss_d = realness(images, real=True) + realness(generated.detach(), real=False)
            run.backward(loss_d)
            optimizer_d.step()

            optimizer_g.zero_grad()
            loss_g = realness(generated, real=True)
            run.backward(loss_g)  # leaves gradients in the discriminator, which its own zero_grad() clears
            optimizer_g.step()
            run.report(loss_d=loss_d.item(), loss_g=loss_g.item())
        with run.evaluation():
            drawn = generator(torch.randn(1000, NOISE, device=run.device))
        away = (drawn.mean(dim=0) - average).abs().mean().item()
        run.report(away=away)
        if run.is_main:
            print(f"epoch {epoch + 1}: the average image is {away:.3f} away from that of real ones", flush=True)


if __name__ == "__main__":
    main()
