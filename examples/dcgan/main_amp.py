"""Trains a generative adversarial network with amp: two models, two optimizers, three losses.

On scikit-learn's 1,797 handwritten digits, or on a folder of images. Saves samples and the curve of the losses as PNG
after each epoch, and both networks.

Source: Radford, Metz, Chintala, "Unsupervised Representation Learning with Deep Convolutional Generative
Adversarial Networks", arXiv:1511.06434.

usage: python main_amp.py [--opt_level O1] [--niter 40] [--dataset folder --dataroot DIR --imageSize 64] ...
needs: torch, apex, rich, matplotlib (with pillow), scikit-learn for the digits
"""

import argparse
import math
from pathlib import Path

import matplotlib
import numpy
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from apex import amp
from apex.optimizers import FusedAdam

matplotlib.use("Agg")
from matplotlib import pyplot

SUFFIXES = {".jpeg", ".jpg", ".png", ".ppm", ".bmp", ".webp"}


def parse():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--dataset", default="digits", choices=["digits", "folder"])
    add("--dataroot", type=Path, help="folder of images, at any depth")
    add("--batchSize", type=int, default=64)
    add("--imageSize", type=int, default=16, help="height and width: 8, 16, 32, 64, ...")
    add("--nz", type=int, default=32, help="size of the latent vector")
    add("--ngf", type=int, default=16, help="channels of the generator's last but one layer")
    add("--ndf", type=int, default=16, help="channels of the discriminator's first layer")
    add("--niter", type=int, default=40, help="epochs")
    add("--lr", type=float, default=5e-4)
    add("--beta1", type=float, default=0.5, help="of Adam")
    add("--netG", help="generator to go on from")
    add("--netD", help="discriminator to go on from")
    add("--outf", type=Path, default=Path("out"), help="folder of images and checkpoints (default: out)")
    add("--manualSeed", type=int, default=2809)
    add("--opt_level", default="O1", help="O0 to O5")
    arguments = parser.parse_args()
    if arguments.imageSize < 8 or arguments.imageSize & (arguments.imageSize - 1):
        parser.error("--imageSize must be 8, 16, 32, 64, ...")
    if (arguments.dataset == "folder") != (arguments.dataroot is not None):
        parser.error("--dataset folder and --dataroot DIR belong together")
    return arguments


def images_of(arguments):
    """float32 (N, channels, size, size) in [-1, 1]."""
    size = arguments.imageSize
    if arguments.dataset == "digits":
        from sklearn.datasets import load_digits

        images = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 16
        images = nn.functional.interpolate(images, (size, size), mode="bilinear")
    else:
        from PIL import Image, ImageOps

        paths = sorted(p for p in arguments.dataroot.rglob("*") if p.suffix.lower() in SUFFIXES)
        if not paths:
            raise SystemExit(f"{arguments.dataroot} holds no images")
        fitted = [ImageOps.fit(Image.open(path).convert("RGB"), (size, size)) for path in paths]
        images = torch.from_numpy(numpy.stack([numpy.asarray(i) for i in fitted])).permute(0, 3, 1, 2) / 255
    return images * 2 - 1


def generator(size, latent, width, channels):
    """(N, latent, 1, 1) -> (N, channels, size, size) in [-1, 1]."""
    doublings = int(math.log2(size // 4))
    planes = width << (doublings - 1)
    layers = [nn.ConvTranspose2d(latent, planes, 4, bias=False), nn.BatchNorm2d(planes), nn.ReLU(True)]
    for _ in range(doublings - 1):
        layers += [
            nn.ConvTranspose2d(planes, planes // 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(planes // 2),
            nn.ReLU(True),
        ]
        planes //= 2
    return nn.Sequential(*layers, nn.ConvTranspose2d(planes, channels, 4, 2, 1, bias=False), nn.Tanh())


def discriminator(size, width, channels):
    """(N, channels, size, size) -> (N,): above 0 for what it takes for real."""
    layers = [nn.Conv2d(channels, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, True)]
    planes = width
    for _ in range(int(math.log2(size // 4)) - 1):
        layers += [
            nn.Conv2d(planes, 2 * planes, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * planes),
            nn.LeakyReLU(0.2, True),
        ]
        planes *= 2
    return nn.Sequential(*layers, nn.Conv2d(planes, 1, 4, bias=False), nn.Flatten(0))


def initialize_weights(module):
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(module.weight, 0.0, 0.02)
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.02)


def save_grid(images, path):
    """64 images of (N, channels, size, size) in [-1, 1], eight in a row."""
    images = images[:64].float().cpu()
    rows = [torch.cat(list(row), -1) for row in images.split(8)]
    width = rows[0].shape[-1]
    rows = [nn.functional.pad(row, (0, width - row.shape[-1])) for row in rows]
    picture = (torch.cat(rows, 1).permute(1, 2, 0) + 1) / 2
    pyplot.imsave(path, picture.expand(-1, -1, 3).clamp(0, 1).numpy())


def draw(history, path):
    figure, axes = pyplot.subplots(layout="constrained")
    epochs = range(1, len(history) + 1)
    for name, values in zip(("discriminator", "generator"), zip(*history, strict=True), strict=True):
        axes.plot(epochs, values, label=name)
    axes.set(xlabel="epoch", ylabel="mean loss")
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)


class Gan:
    """Both networks and their optimizers."""

    def __init__(self, arguments, channels, device):
        self.device, self.latent = device, arguments.nz
        self.net_g = generator(arguments.imageSize, arguments.nz, arguments.ngf, channels)
        self.net_d = discriminator(arguments.imageSize, arguments.ndf, channels)
        for net, path in ((self.net_g, arguments.netG), (self.net_d, arguments.netD)):
            net.to(device).apply(initialize_weights)
            if path:
                net.load_state_dict(torch.load(path, map_location=device))
        options = dict(lr=arguments.lr, betas=(arguments.beta1, 0.999))
        optimizers = [FusedAdam(net.parameters(), **options) for net in (self.net_d, self.net_g)]
        [self.net_d, self.net_g], [self.optimizer_d, self.optimizer_g] = amp.initialize(
            [self.net_d, self.net_g], optimizers, opt_level=arguments.opt_level, num_losses=3, verbosity=0
        )
        self.criterion = nn.BCEWithLogitsLoss()

    def noise(self, count):
        return torch.randn(count, self.latent, 1, 1, device=self.device)

    def step(self, real):
        """One step of each network; returns their losses, as a tensor of two elements."""
        ones = torch.ones(len(real), device=self.device)
        zeros = torch.zeros_like(ones)

        # The discriminator: real images are 1, made ones 0. Each loss has a scale of its own.
        self.optimizer_d.zero_grad()
        loss_real = self.criterion(self.net_d(real), ones)
        with amp.scale_loss(loss_real, self.optimizer_d, loss_id=0) as scaled_loss:
            scaled_loss.backward()
        fake = self.net_g(self.noise(len(real)))
        loss_fake = self.criterion(self.net_d(fake.detach()), zeros)
        with amp.scale_loss(loss_fake, self.optimizer_d, loss_id=1) as scaled_loss:
            scaled_loss.backward()
        self.optimizer_d.step()

        # The generator: made images should be taken for real.
        self.optimizer_g.zero_grad()
        loss_made = self.criterion(self.net_d(fake), ones)
        with amp.scale_loss(loss_made, self.optimizer_g, loss_id=2) as scaled_loss:
            scaled_loss.backward()
        self.optimizer_g.step()
        return torch.stack([loss_real + loss_fake, loss_made]).detach()


def main():
    arguments = parse()
    arguments.outf.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(arguments.manualSeed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = images_of(arguments)
    loader = DataLoader(TensorDataset(images), arguments.batchSize, shuffle=True, drop_last=True)
    if not len(loader):
        raise SystemExit(f"{len(images)} images are fewer than --batchSize {arguments.batchSize}")
    gan = Gan(arguments, images.shape[1], device)
    fixed_noise = gan.noise(64)
    save_grid(images, arguments.outf / "real_samples.png")

    history = []
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[losses]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("", total=arguments.niter * len(loader), losses="")
        for epoch in range(arguments.niter):
            total = torch.zeros(2, device=device)
            for (real,) in loader:
                total += gan.step(real.to(device, non_blocking=True))
                progress.advance(task)
            history.append((total / len(loader)).tolist())
            losses = "discriminator {:.3f}  generator {:.3f}".format(*history[-1])
            progress.update(task, losses=losses)
            with torch.no_grad():
                save_grid(gan.net_g(fixed_noise), arguments.outf / f"amp_fake_samples_epoch_{epoch:03d}.png")
            draw(history, arguments.outf / "losses.png")
    torch.save(gan.net_g.state_dict(), arguments.outf / "netG.pth")
    torch.save(gan.net_d.state_dict(), arguments.outf / "netD.pth")
    print(f"{len(history)} epochs on {len(images)} images: {losses}")


if __name__ == "__main__":
    main()
