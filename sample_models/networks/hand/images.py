"""Networks over images: segmentation, detection, representations without labels, attention to places."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .case import Case, mlp, network

IMAGES, SIZE, CLASSES = 4, 32, 6


def images(count: int = IMAGES, channels: int = 3, size: int = SIZE) -> torch.Tensor:
    """A batch of them."""
    return torch.randn(count, channels, size, size)


def classes(model: nn.Module) -> Case:
    """A class for every image."""
    return Case(model, lambda: (images(), torch.randint(0, CLASSES, (IMAGES,))))


def conv(before: int, after: int, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    """Convolution, normalization, activation."""
    layer = nn.Conv2d(before, after, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(after), nn.ReLU(inplace=True))


class Residual(nn.Module):
    """He et al. 2015."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.first = conv(before, after, stride=stride)
        self.second = nn.Sequential(nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after))
        self.skip = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The stream further on."""
        return F.relu(self.second(self.first(x)) + self.skip(x))


def features(out: int = 32) -> nn.Sequential:
    """A small residual network, up to one vector for each image."""
    blocks = [conv(3, 16), Residual(16, 16), Residual(16, out, 2), Residual(out, out)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())


@network("ResNet of CIFAR")
def resnet() -> Case:
    return classes(nn.Sequential(features(), nn.Linear(32, CLASSES)))


class UNet(nn.Module):
    """Ronneberger et al. 2015."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [3, 16, 32, 64]
        self.down = nn.ModuleList(nn.Sequential(conv(a, b), conv(b, b)) for a, b in itertools.pairwise(sizes))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in [(32, 64), (16, 32)])
        self.after = nn.ModuleList([conv(64, 32), conv(32, 16)])
        self.out = nn.Conv2d(16, CLASSES, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of every pixel."""
        kept = []
        for index, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if index else x)
            kept.append(x)
        for up, after, skip in zip(self.up, self.after, kept[-2::-1], strict=True):
            x = after(torch.cat([up(x), skip], 1))
        return self.out(x)


@network("U-Net")
def unet() -> Case:
    return Case(UNet(), lambda: (images(), torch.randint(0, CLASSES, (IMAGES, SIZE, SIZE))))


@network("U-Net, Dice loss")
def dice_unet() -> Case:
    def dice(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        shares, wanted = scores.softmax(1), F.one_hot(target, CLASSES).movedim(-1, 1)
        both = (shares * wanted).sum((2, 3))
        return 1 - ((2 * both + 1) / (shares.sum((2, 3)) + wanted.sum((2, 3)) + 1)).mean()

    return Case(UNet(), lambda: (images(), torch.randint(0, CLASSES, (IMAGES, SIZE, SIZE))), dice)


class Pyramid(nn.Module):
    """Lin et al. 2017, RetinaNet: a feature pyramid, heads that all levels share, focal loss and boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([conv(3, 16, stride=2), Residual(16, 32, 2), Residual(32, 64, 2)])
        self.sides = nn.ModuleList(nn.Conv2d(size, 32, 1) for size in (16, 32, 64))
        self.scores = nn.Sequential(conv(32, 32), nn.Conv2d(32, CLASSES, 3, padding=1))
        self.boxes = nn.Sequential(conv(32, 32), nn.Conv2d(32, 4, 3, padding=1))

    def forward(self, x: torch.Tensor, kinds: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        """The loss, of targets at every place of every level."""
        levels = []
        for stage in self.stages:
            x = stage(x)
            levels.append(x)
        top, made = None, []
        for side, level in zip(reversed(self.sides), reversed(levels), strict=True):
            here = side(level)
            top = here if top is None else here + F.interpolate(top, scale_factor=2.0, mode="nearest")
            made.append(torch.cat([self.scores(top), self.boxes(top)], 1).flatten(2))
        scores, places = torch.cat(made, 2).split([CLASSES, 4], 1)
        wanted = F.one_hot(kinds, CLASSES + 1)[..., 1:].movedim(-1, 1).to(x.dtype)
        missed = F.binary_cross_entropy_with_logits(scores, wanted, reduction="none")
        focal = (missed * (1 - (-missed).exp()) ** 2).sum() / wanted.sum().clamp(min=1)
        there = (kinds > 0).unsqueeze(1)
        return focal + (F.smooth_l1_loss(places, boxes, reduction="none") * there).sum() / there.sum().clamp(min=1)


@network("RetinaNet, focal loss")
def retina_net() -> Case:
    places = sum((SIZE // 2**i) ** 2 for i in (1, 2, 3))

    def batch() -> tuple[torch.Tensor, ...]:
        return images(), torch.randint(0, CLASSES + 1, (IMAGES, places)), torch.rand(IMAGES, 4, places)

    return Case(Pyramid(), batch, None)


@network("ESPCN, pixel shuffle")
def espcn() -> Case:
    """Shi et al. 2016."""
    layers = [nn.Conv2d(3, 32, 5, padding=2), nn.Tanh(), nn.Conv2d(32, 16, 3, padding=1), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Conv2d(16, 12, 3, padding=1), nn.PixelShuffle(2))
    return Case(model, lambda: (images(), images(size=2 * SIZE)), F.l1_loss)


class SpatialTransformer(nn.Module):
    """Jaderberg et al. 2015: where to look is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Sequential(nn.Conv2d(3, 8, 7, 2), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), mlp(288, 32, 6))
        self.rest = nn.Sequential(features(), nn.Linear(32, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scores of the image."""
        start = torch.tensor([1.0, 0, 0, 0, 1, 0])
        grid = F.affine_grid((self.where(x) + start).unflatten(1, (2, 3)), list(x.shape), align_corners=False)
        return self.rest(F.grid_sample(x, grid, align_corners=False))


@network("spatial transformer")
def spatial_transformer() -> Case:
    return classes(SpatialTransformer())


class Capsules(nn.Module):
    """Sabour et al. 2017: three rounds of routing by agreement."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv2d(3, 16, 9), nn.ReLU(), nn.Conv2d(16, 32, 9, 4))
        self.turns = nn.Parameter(torch.randn(64, CLASSES, 16, 8) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Length of each class's vector."""
        parts = self.squash(self.front(x).unflatten(1, (4, 8)).movedim(2, -1).flatten(1, -2))
        votes = torch.einsum("kcij,nkj->nkci", self.turns[: parts.shape[1]], parts)
        scores = torch.zeros(votes.shape[:3])
        for _ in range(3):
            made = self.squash((scores.softmax(2).unsqueeze(-1) * votes).sum(1))
            scores = scores + (votes * made.unsqueeze(1)).sum(-1)
        return made.norm(dim=-1)

    @staticmethod
    def squash(x: torch.Tensor) -> torch.Tensor:
        """Shorter than one."""
        square = x.square().sum(-1, keepdim=True)
        return x * square / (1 + square) / (square + 1e-8).sqrt()


@network("CapsNet")
def capsules() -> Case:
    return Case(Capsules(), lambda: (images(), torch.randint(0, CLASSES, (IMAGES,))), F.multi_margin_loss)


class SimCLR(nn.Module):
    """Chen et al. 2020: two views of each image are to be nearer than those of others."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(features(), mlp(32, 32, 16))

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The loss."""
        z = F.normalize(self.network(torch.cat([one, other])), dim=-1)
        alike = (z @ z.t() / 0.2).masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf)
        return F.cross_entropy(alike, torch.arange(len(z)).roll(len(z) // 2))


@network("SimCLR")
def simclr() -> Case:
    return Case(SimCLR(), lambda: (images(), images()), None)


class BYOL(nn.Module):
    """Grill et al. 2020: one network foretells what another, that is not trained, makes of the other view."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(features(), mlp(32, 32, 16))
        self.target = nn.Sequential(features(), mlp(32, 32, 16)).requires_grad_(False)
        self.foretell = mlp(16, 32, 16)

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """The loss."""
        with torch.no_grad():
            wanted = self.target(other)
        return 2 - 2 * F.cosine_similarity(self.foretell(self.online(one)), wanted, dim=-1).mean()


@network("BYOL, a target that is not trained")
def byol() -> Case:
    return Case(BYOL(), lambda: (images(), images()), None)


class Triplets(nn.Module):
    """Schroff et al. 2015."""

    def __init__(self) -> None:
        super().__init__()
        self.network = features()

    def forward(self, anchor: torch.Tensor, near: torch.Tensor, far: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return F.triplet_margin_loss(self.network(anchor), self.network(near), self.network(far))


@network("siamese network, triplets")
def triplets() -> Case:
    return Case(Triplets(), lambda: (images(), images(), images()), None)


class Style(nn.Module):
    """Johnson et al. 2016: an image network whose loss compares features, and their products, of a fixed network."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.ReflectionPad2d(4), nn.Conv2d(3, 16, 9), nn.InstanceNorm2d(16, affine=True), nn.ReLU(),
            nn.Conv2d(16, 16, 3, padding=1), nn.InstanceNorm2d(16, affine=True), nn.ReLU(), nn.Conv2d(16, 3, 1),
        )  # fmt: skip
        self.judge = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(16, 32, 3))
        self.judge.requires_grad_(False)

    def forward(self, x: torch.Tensor, style: torch.Tensor) -> torch.Tensor:
        """The loss."""
        made, wanted, like = (self.judge(each) for each in (self.network(x), x, style))
        return F.mse_loss(made, wanted) + 10 * F.mse_loss(self.gram(made), self.gram(like))

    @staticmethod
    def gram(x: torch.Tensor) -> torch.Tensor:
        """Products of channels."""
        flat = x.flatten(2)
        return flat @ flat.transpose(1, 2) / flat.shape[-1]


@network("style transfer, Gram matrices")
def style() -> Case:
    return Case(Style(), lambda: (images(), images()), None)


class FakeQuantized(nn.Module):
    """A layer whose weights and inputs are rounded to 8 bits, straight through backwards."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The layer's output."""
        weight, bias = self.rounded(self.layer.weight), self.layer.bias
        return F.conv2d(self.rounded(x), weight, bias, self.layer.stride, self.layer.padding)

    @staticmethod
    def rounded(x: torch.Tensor) -> torch.Tensor:
        """A multiple of the scale."""
        scale = x.detach().abs().amax() / 127
        return x + ((x / scale).round().clamp(-127, 127) * scale - x).detach()


@network("quantization-aware training")
def quantized() -> Case:
    layers: list[nn.Module] = []
    for before, after in [(3, 16), (16, 32), (32, 32)]:
        layers += [FakeQuantized(nn.Conv2d(before, after, 3, 2, 1)), nn.BatchNorm2d(after), nn.Hardswish()]
    return classes(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, CLASSES)))


class Attended(nn.Module):
    """Woo et al. 2018, CBAM: channels, then places, are weighted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.channels, self.places = mlp(width, width // 4, width), nn.Conv2d(2, 1, 7, padding=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x, weighted."""
        shares = (self.channels(x.mean((2, 3))) + self.channels(x.amax((2, 3)))).sigmoid()
        x = x * shares[:, :, None, None]
        return x * self.places(torch.stack([x.mean(1), x.amax(1)], 1)).sigmoid()


@network("CBAM")
def cbam() -> Case:
    blocks = [conv(3, 16), Attended(16), Residual(16, 32, 2), Attended(32), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return classes(nn.Sequential(*blocks, nn.Linear(32, CLASSES)))


@network("3D convolutions")
def volumes() -> Case:
    def layer(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv3d(before, after, 3, padding=1), nn.BatchNorm3d(after), nn.ReLU(), nn.MaxPool3d(2)]

    model = nn.Sequential(*layer(1, 8), *layer(8, 16), *layer(16, 32), nn.Flatten(), nn.Linear(256, CLASSES))
    return Case(model, lambda: (torch.randn(2, 1, 16, 16, 16), torch.randint(0, CLASSES, (2,))))
