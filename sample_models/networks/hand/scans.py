"""Networks over time: convolutions, state-space models and recurrences that are written out, speech."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .case import Case, network
from .texts import WIDTH, Decoder, language

SERIES, TIME, CHANNELS, STATE = 4, 48, 8, 4


class CausalConv(nn.Conv1d):
    """Padded on the left only."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As long as x."""
        return super().forward(F.pad(x, (self.dilation[0] * (self.kernel_size[0] - 1), 0)))


class TCN(nn.Module):
    """Bai et al. 2018: dilated causal convolutions with normalized weights."""

    def __init__(self, normalized: Any) -> None:
        super().__init__()
        sizes = [CHANNELS, 24, 24, 24]
        self.layers = nn.ModuleList(
            normalized(CausalConv(before, after, 3, dilation=2**i))
            for i, (before, after) in enumerate(itertools.pairwise(sizes))
        )
        self.skips = nn.ModuleList(nn.Conv1d(a, b, 1) for a, b in itertools.pairwise(sizes))
        self.out = nn.Conv1d(24, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A value at every moment."""
        for layer, skip in zip(self.layers, self.skips, strict=True):
            x = F.relu(layer(x)) + skip(x)
        return self.out(x)


def series(model: nn.Module) -> Case:
    """Forecast of a series from others."""
    return Case(model, lambda: (torch.randn(SERIES, CHANNELS, TIME), torch.randn(SERIES, 1, TIME)), F.mse_loss)


@network("TCN, weight norm")
def tcn() -> Case:
    return series(TCN(nn.utils.parametrizations.weight_norm))


@network("TCN, weight norm as before torch 2")
def old_tcn() -> Case:
    return series(TCN(nn.utils.weight_norm))


@network("TCN, spectral norm")
def spectral_tcn() -> Case:
    return series(TCN(nn.utils.parametrizations.spectral_norm))


class WaveNet(nn.Module):
    """van den Oord et al. 2016: gated dilated convolutions, skips to the scores of 32 levels."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 24)
        self.gates = nn.ModuleList(CausalConv(24, 48, 2, dilation=2**i) for i in range(5))
        self.residuals = nn.ModuleList(nn.Conv1d(24, 24, 1) for _ in range(5))
        self.skips = nn.ModuleList(nn.Conv1d(24, 24, 1) for _ in range(5))
        self.out = nn.Sequential(nn.ReLU(), nn.Conv1d(24, 24, 1), nn.ReLU(), nn.Conv1d(24, 32, 1))

    def forward(self, levels: torch.Tensor) -> torch.Tensor:
        """Scores (N, 32, time)."""
        x, skipped = self.embedding(levels).transpose(1, 2), torch.zeros(())
        for gate, residual, skip in zip(self.gates, self.residuals, self.skips, strict=True):
            made, opened = gate(x).chunk(2, 1)
            made = made.tanh() * opened.sigmoid()
            x, skipped = x + residual(made), skipped + skip(made)
        return self.out(skipped)


@network("WaveNet")
def wavenet() -> Case:
    def levels() -> torch.Tensor:
        return torch.randint(0, 32, (SERIES, TIME))

    return Case(WaveNet(), lambda: (levels(), levels()))


class DeepSpeech(nn.Module):
    """Amodei et al. 2015: convolutions over time and frequency, recurrent layers, scores of letters."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv2d(1, 8, (5, 5), (2, 1), 2), nn.BatchNorm2d(8), nn.Hardtanh(0, 20),
            nn.Conv2d(8, 8, (5, 3), (2, 1), (2, 1)), nn.BatchNorm2d(8), nn.Hardtanh(0, 20),
        )  # fmt: skip
        self.layers = nn.GRU(8 * 5, 32, 2, bidirectional=True)
        self.out = nn.Linear(64, 12)

    def forward(self, sound: torch.Tensor) -> torch.Tensor:
        """Log-probabilities (time, N, letters)."""
        x = self.front(sound).flatten(1, 2).permute(2, 0, 1)
        return self.out(self.layers(x)[0]).log_softmax(-1)


@network("DeepSpeech, CTC")
def deep_speech() -> Case:
    def loss(scores: torch.Tensor, letters: torch.Tensor) -> torch.Tensor:
        times = torch.full((scores.shape[1],), scores.shape[0])
        return F.ctc_loss(scores, letters, times, torch.full((scores.shape[1],), letters.shape[1]))

    return Case(DeepSpeech(), lambda: (torch.randn(SERIES, 1, 20, 20), torch.randint(1, 12, (SERIES, 5))), loss)


class S4D(nn.Module):
    """Gu et al. 2022, S4D-Real: a diagonal state-space model as one long convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.arange(1.0, STATE + 1).log().repeat(WIDTH, 1))
        self.step = nn.Parameter(torch.full((WIDTH, 1), -3.0))
        self.read, self.skip = nn.Parameter(torch.randn(WIDTH, STATE)), nn.Parameter(torch.ones(WIDTH))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The stream further on."""
        length = x.shape[1]
        decay = -self.rate.exp() * self.step.exp()
        kernel = (self.read.unsqueeze(-1) * (decay.unsqueeze(-1) * torch.arange(length)).exp()).sum(1)
        y = x.transpose(1, 2)
        made = F.conv1d(F.pad(y, (length - 1, 0)), kernel.flip(-1).unsqueeze(1), groups=WIDTH)
        return x + self.out(F.gelu(made + y * self.skip.unsqueeze(-1)).transpose(1, 2))


@network("S4D, as a convolution")
def s4d() -> Case:
    return language(Decoder(S4D(), S4D()))


class SelectiveScan(nn.Module):
    """Gu & Dao 2023, a block of Mamba; its scan is written out in time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.into = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
        self.conv = CausalConv(WIDTH, WIDTH, 3, groups=WIDTH)
        self.choose, self.step = nn.Linear(WIDTH, 2 * STATE), nn.Linear(WIDTH, WIDTH)
        self.rate = nn.Parameter(torch.arange(1.0, STATE + 1).log().repeat(WIDTH, 1))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The stream further on."""
        y, gate = self.into(self.norm(x)).chunk(2, -1)
        y = F.silu(self.conv(y.transpose(1, 2)).transpose(1, 2))
        step, (write, read) = F.softplus(self.step(y)), self.choose(y).chunk(2, -1)
        decay = (-step.unsqueeze(-1) * self.rate.exp()).exp()
        taken = (step * y).unsqueeze(-1) * write.unsqueeze(2)
        state, made = torch.zeros_like(taken[:, 0]), []
        for time in range(x.shape[1]):
            state = decay[:, time] * state + taken[:, time]
            made.append((state * read[:, time].unsqueeze(1)).sum(-1))
        return x + self.out(torch.stack(made, 1) * F.silu(gate))


@network("Mamba, scan written out")
def mamba() -> Case:
    return language(Decoder(SelectiveScan()))


class TimeMixing(nn.Module):
    """Peng et al. 2023, RWKV: numerator and denominator of an exponentially weighted mean, kept below overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(WIDTH), nn.Parameter(torch.full((3, WIDTH), 0.5))
        self.decay, self.bonus = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gate, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The stream further on."""
        y = self.norm(x)
        before = F.pad(y, (0, 0, 1, -1))
        k, v, r = (
            layer(y * mix + before * (1 - mix))
            for layer, mix in zip((self.key, self.value, self.gate), self.mix, strict=True)
        )
        above, below, top = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), torch.full_like(k[:, 0], -1e30)
        made = []
        for key, value in zip(k.unbind(1), v.unbind(1), strict=True):
            here = torch.maximum(top, key + self.bonus)
            old, new = (top - here).exp(), (key + self.bonus - here).exp()
            made.append((old * above + new * value) / (old * below + new))
            here = torch.maximum(top - self.decay.exp(), key)
            old, new = (top - self.decay.exp() - here).exp(), (key - here).exp()
            above, below, top = old * above + new * value, old * below + new, here
        return x + self.out(r.sigmoid() * torch.stack(made, 1))


@network("RWKV, time mixing")
def rwkv() -> Case:
    return language(Decoder(TimeMixing()))


class ConvLSTM(nn.Module):
    """Shi et al. 2015: an LSTM whose products are convolutions, over frames."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.out = nn.Conv2d(1 + 12, 48, 3, padding=1), nn.Conv2d(12, 1, 1)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        """The frame after the last."""
        hidden = cell = frames.new_zeros(len(frames), 12, *frames.shape[-2:])
        for frame in frames.unbind(1):
            i, f, o, g = self.gates(torch.cat([frame, hidden], 1)).chunk(4, 1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
        return self.out(hidden)


@network("ConvLSTM")
def conv_lstm() -> Case:
    return Case(ConvLSTM(), lambda: (torch.randn(2, 6, 1, 16, 16), torch.randn(2, 1, 16, 16)), F.mse_loss)


class Forecast(nn.Module):
    """Oreshkin et al. 2019, N-BEATS: each block explains what is left of the past, and adds to the future."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(TIME, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, TIME + 12))
            for _ in range(4)
        )

    def forward(self, past: torch.Tensor) -> torch.Tensor:
        """Twelve values."""
        future = past.new_zeros(len(past), 12)
        for block in self.blocks:
            explained, more = block(past).split([TIME, 12], 1)
            past, future = past - explained, future + more
        return future


@network("N-BEATS")
def n_beats() -> Case:
    return Case(Forecast(), lambda: (torch.randn(64, TIME), torch.randn(64, 12)), F.smooth_l1_loss)
