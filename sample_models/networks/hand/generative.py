"""Networks that generate; their random numbers are part of the batch, so that torch can be followed."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from .case import Case, mlp, network
from .images import images

NOISE, SIZE, COUNT = 16, 16, 8


class VAE(nn.Module):
    """Kingma & Welling 2013, with convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(1, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 4, 2, 1), nn.ReLU(), nn.Flatten(),
            nn.Linear(512, 2 * NOISE),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Linear(NOISE, 512), nn.ReLU(), nn.Unflatten(1, (32, 4, 4)), nn.ConvTranspose2d(32, 16, 4, 2, 1),
            nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """The loss."""
        mean, log_var = self.encoder(x).chunk(2, 1)
        made = self.decoder(mean + noise * (0.5 * log_var).exp())
        apart = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1).mean()
        return F.binary_cross_entropy_with_logits(made, x.sigmoid(), reduction="sum") / len(x) + apart


@network("VAE")
def vae() -> Case:
    return Case(VAE(), lambda: (images(COUNT, 1, SIZE), torch.randn(COUNT, NOISE)), None)


class VQVAE(nn.Module):
    """van den Oord et al. 2017: the nearest of 32 codes, straight through backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 16, 4, 2, 1), nn.ReLU(), nn.Conv2d(16, NOISE, 4, 2, 1))
        self.codes = nn.Embedding(32, NOISE)
        layers = [nn.ConvTranspose2d(NOISE, 16, 4, 2, 1), nn.ReLU(), nn.ConvTranspose2d(16, 3, 4, 2, 1)]
        self.decoder = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        z = self.encoder(x).movedim(1, -1)
        nearest = torch.cdist(z.flatten(0, -2), self.codes.weight).argmin(1).view(z.shape[:-1])
        code = self.codes(nearest)
        made = self.decoder((z + (code - z).detach()).movedim(-1, 1))
        return F.mse_loss(made, x) + F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())


@network("VQ-VAE")
def vq_vae() -> Case:
    return Case(VQVAE(), lambda: (images(COUNT, 3, SIZE),), None)


def generator() -> nn.Sequential:
    """Radford et al. 2015, DCGAN."""
    return nn.Sequential(
        nn.ConvTranspose2d(NOISE, 64, 4, bias=False), nn.BatchNorm2d(64), nn.ReLU(True),
        nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(True),
        nn.ConvTranspose2d(32, 3, 4, 2, 1), nn.Tanh(),
    )  # fmt: skip


def critic() -> nn.Sequential:
    """The other side; what norm its layers have is up to the network."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(),
        nn.Linear(1024, 1),
    )  # fmt: skip


class Generated(nn.Module):
    """What trains a generator, through a discriminator that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.critic = generator(), critic().requires_grad_(False)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        """The loss."""
        scores = self.critic(self.generator(noise))
        return F.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))


@network("DCGAN, generator")
def dcgan_generator() -> Case:
    return Case(Generated(), lambda: (torch.randn(COUNT, NOISE, 1, 1),), None)


class Discriminated(nn.Module):
    """Miyato et al. 2018: a discriminator with spectral norms, hinge loss."""

    def __init__(self) -> None:
        super().__init__()
        self.critic, self.generator = critic(), generator().requires_grad_(False)
        for layer in self.critic:
            if hasattr(layer, "weight"):
                spectral_norm(layer)

    def forward(self, real: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """The loss."""
        with torch.no_grad():
            made = self.generator(noise)
        return F.relu(1 - self.critic(real)).mean() + F.relu(1 + self.critic(made)).mean()


@network("SN-GAN, discriminator")
def sngan_discriminator() -> Case:
    return Case(Discriminated(), lambda: (images(COUNT, 3, SIZE), torch.randn(COUNT, NOISE, 1, 1)), None)


class Penalized(nn.Module):
    """Gulrajani et al. 2017, WGAN-GP: the critic's slope between two images is to be one."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = critic()

    def forward(self, real: torch.Tensor, made: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        """The loss, with a gradient inside."""
        between = (share * real + (1 - share) * made).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
        return self.critic(made).mean() - self.critic(real).mean() + 10 * penalty


@network("WGAN-GP, critic")
def wgan_gp() -> Case:
    def batch() -> tuple[torch.Tensor, ...]:
        return images(COUNT, 3, SIZE), images(COUNT, 3, SIZE), torch.rand(COUNT, 1, 1, 1)

    return Case(Penalized(), batch, None)


class Modulated(nn.Module):
    """Karras et al. 2019, StyleGAN2: each image has weights of its own, scaled by its style."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.weight, self.style = nn.Parameter(torch.randn(after, before, 3, 3)), nn.Linear(NOISE, before)

    def forward(self, x: torch.Tensor, style: torch.Tensor) -> torch.Tensor:
        """One convolution of as many groups as images."""
        weight = self.weight * (self.style(style) + 1)[:, None, :, None, None]
        weight = weight * (weight.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
        made = F.conv2d(x.flatten(0, 1).unsqueeze(0), weight.flatten(0, 1), padding=1, groups=len(x))
        return made.unflatten(1, (len(x), -1)).squeeze(0)


class StyleGAN(nn.Module):
    """A generator of three such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.mapping, self.start = mlp(NOISE, 32, NOISE), nn.Parameter(torch.randn(1, 32, 4, 4))
        self.layers = nn.ModuleList([Modulated(32, 32), Modulated(32, 16)])
        self.out, self.critic = nn.Conv2d(16, 3, 1), critic().requires_grad_(False)

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        """The loss."""
        style, x = self.mapping(noise), self.start.expand(len(noise), -1, -1, -1)
        for layer in self.layers:
            x = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
            x = F.leaky_relu(layer(x, style), 0.2)
        return F.softplus(-self.critic(self.out(x))).mean()


@network("StyleGAN2, modulated convolutions")
def stylegan() -> Case:
    return Case(StyleGAN(), lambda: (torch.randn(COUNT, NOISE),), None)


class Denoising(nn.Module):
    """A block of the U-Net below, which is given the time."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(4, before), nn.GroupNorm(4, after)])
        self.first, self.second = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        self.time, self.skip = nn.Linear(32, after), nn.Conv2d(before, after, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        """The image further on."""
        y = self.first(F.silu(self.norms[0](x))) + self.time(time)[:, :, None, None]
        return self.skip(x) + self.second(F.silu(self.norms[1](y)))


class Places(nn.Module):
    """Attention between pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.GroupNorm(4, width), nn.Conv2d(width, 3 * width, 1), nn.Conv2d(width, width, 1)
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The image further on."""
        q, k, v = (each.flatten(2).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, 1))
        made = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(made.transpose(1, 2).unflatten(2, x.shape[2:]))


class DDPM(nn.Module):
    """Ho et al. 2020."""

    kept: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.time = mlp(16, 32, 32, act=nn.SiLU)
        self.into, self.out = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 3, 1)
        self.down, self.inside = nn.ModuleList([Denoising(16, 16), Denoising(16, 32)]), Places(32)
        self.up = nn.ModuleList([Denoising(64, 16), Denoising(32, 16)])
        self.register_buffer("kept", torch.linspace(0.9999, 0.98, 100).cumprod(0))

    def forward(self, x: torch.Tensor, time: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """The loss: what noise was added?"""
        share = self.kept[time][:, None, None, None]
        rates = torch.exp(-math.log(1e4) * torch.arange(8) / 8)
        angles = time[:, None] * rates
        embedded = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        y = self.into(share.sqrt() * x + (1 - share).sqrt() * noise)
        first = self.down[0](y, embedded)
        second = self.down[1](F.avg_pool2d(first, 2), embedded)
        y = self.up[0](torch.cat([self.inside(second), second], 1), embedded)
        y = self.up[1](torch.cat([F.interpolate(y, scale_factor=2.0), first], 1), embedded)
        return F.mse_loss(self.out(y), noise)


@network("DDPM, U-Net")
def ddpm() -> Case:
    def batch() -> tuple[torch.Tensor, ...]:
        return images(COUNT, 3, SIZE), torch.randint(0, 100, (COUNT,)), images(COUNT, 3, SIZE)

    return Case(DDPM(), batch, None)


class Masked(nn.Conv2d):
    """Sees only pixels before its own."""

    mask: torch.Tensor

    def __init__(self, before: int, after: int, size: int, own: bool) -> None:
        super().__init__(before, after, size, padding=size // 2)
        mask = torch.ones(size, size).flatten()
        mask[size * size // 2 + own :] = 0
        self.register_buffer("mask", mask.view(size, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """With the rest of the weight at zero."""
        return F.conv2d(x, self.weight * self.mask, self.bias, self.stride, self.padding)


@network("PixelCNN, masked convolutions")
def pixel_cnn() -> Case:
    """van den Oord et al. 2016."""
    layers: list[nn.Module] = [Masked(1, 24, 7, False), nn.ReLU()]
    for _ in range(3):
        layers += [Masked(24, 24, 3, True), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(24, 8, 1))
    return Case(model, lambda: (images(COUNT, 1, SIZE), torch.randint(0, 8, (COUNT, SIZE, SIZE))))


class Coupling(nn.Module):
    """Dinh et al. 2016, RealNVP: half of the values are scaled and moved by the others."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.network = mlp(size, 48, 48, 2 * size)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Values, and the logarithm of the determinant."""
        kept, moved = x.chunk(2, 1)
        scale, shift = self.network(kept).chunk(2, 1)
        scale = scale.tanh()
        return torch.cat([moved * scale.exp() + shift, kept], 1), scale.sum(1)


class RealNVP(nn.Module):
    """Six of these."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Coupling(4) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Negative log-likelihood."""
        grown = x.new_zeros(len(x))
        for layer in self.layers:
            x, more = layer(x)
            grown = grown + more
        return (0.5 * (x.square() + math.log(2 * math.pi)).sum(1) - grown).mean()


@network("RealNVP")
def real_nvp() -> Case:
    return Case(RealNVP(), lambda: (torch.randn(64, 8),), None)


class TiedAutoencoder(nn.Module):
    """The decoder's weight is the encoder's, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(24, 64) * 0.1), nn.Parameter(torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x, from 24 numbers."""
        return F.linear(F.selu(F.linear(x, self.weight)), self.weight.t(), self.bias)


@network("autoencoder, tied weights")
def tied() -> Case:
    def batch() -> tuple[torch.Tensor, ...]:
        x = torch.randn(64, 64)
        return x + 0.1 * torch.randn(64, 64), x

    return Case(TiedAutoencoder(), batch, F.mse_loss)
