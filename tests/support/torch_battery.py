"""Modules and functions that the PyTorch converter must export, forward and backward: name -> (module, inputs)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn, randn


class Fn(nn.Module):
    """A function of a learnt multiple of its first argument."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.factor = nn.Parameter(torch.tensor(1.3))

    def forward(self, x, *rest):
        return self.function(x * self.factor, *rest)


class Masked(nn.Module):
    """A function of an attention layer and its inputs."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, *inputs):
        return self.function(self.attend, *inputs)


class AttentionPool(nn.Module):
    """Rows weighed by their product with a learnt vector, then that vector by a transposed matrix."""

    def __init__(self):
        super().__init__()
        self.vector = nn.Parameter(randn(8))
        self.matrix = nn.Parameter(randn(8, 8))

    def forward(self, x):
        pooled = (x @ self.vector).softmax(1).unsqueeze(-1) * x
        return pooled.sum(1) + torch.mv(self.matrix.T, self.vector) + (2 * self.matrix.T) @ self.vector


class AddedMaximum(nn.Module):
    """The gradient of `amax` is shared by the elements that equal it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        h = self.linear(x.cumsum(1))
        return h + h.amax(1, keepdim=True)


class Group(nn.Module):
    """Several cases in one step: its loss weighs every element of every output differently."""

    def __init__(self, names):
        super().__init__()
        known = CASES | {name.replace(".", "_"): case for name, case in REFUSED.items()}
        self.inputs = {name: known[name][1] for name in names}
        self.cases = nn.ModuleDict({name: known[name][0] for name in names})

    def forward(self, one):
        return one * sum(self._loss(name, module) for name, module in self.cases.items())

    def _loss(self, name, module):
        inputs = self.inputs[name]
        made = module(*inputs) if isinstance(inputs, tuple) else module(inputs)
        floats = [
            x for x in torch.utils._pytree.tree_leaves(made) if isinstance(x, torch.Tensor) and x.is_floating_point()
        ]
        return sum((x * torch.linspace(0.5, 1.5, x.numel()).view(x.shape)).sum() / 10 for x in floats)


def img():
    return randn(2, 4, 12, 12)


def seq():
    return randn(2, 10, 8)


def scattered(reduce, start, **options):
    fn = Fn(lambda x, i: start(2, 6, 8).scatter_reduce(1, i, x, reduce, **options))
    return fn, (seq(), torch.randint(0, 6, (2, 10, 8)))


def vol():
    return randn(2, 3, 8, 8, 8)


torch.manual_seed(0)
CASES = {
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1), randn(2, 4, 11)),
    "conv2d": (nn.Conv2d(4, 6, 3, padding=1), img()),
    "conv2d_pointwise": (nn.Sequential(nn.Conv2d(4, 5, 1), nn.Conv2d(5, 6, 1, stride=(1, 3))), img()),
    "convT2d_pointwise": (nn.Sequential(nn.Conv2d(4, 5, 1), nn.ConvTranspose2d(5, 6, 1, 2)), img()),
    "conv2d_dil": (nn.Conv2d(4, 6, 3, dilation=2, stride=2, padding=2), img()),
    "conv2d_group": (nn.Conv2d(4, 8, 3, groups=2), img()),
    "conv2d_dw": (nn.Conv2d(4, 8, 3, groups=4, stride=2), img()),
    "conv2d_same": (nn.Conv2d(4, 4, 4, padding="same"), img()),
    "conv2d_reflect": (nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"), img()),
    "conv3d": (nn.Conv3d(3, 4, 3, padding=1, stride=2), vol()),
    "convT1d": (nn.ConvTranspose1d(4, 6, 3, stride=2), randn(2, 4, 11)),
    "convT2d": (nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1), img()),
    "convT2d_group": (nn.ConvTranspose2d(4, 8, 3, stride=2, groups=2, dilation=2), img()),
    "convT3d": (nn.ConvTranspose3d(3, 4, 2, stride=2), vol()),
    "unfold": (Fn(lambda x: F.unfold(x, 3, padding=1)), img()),
    "fold": (Fn(lambda x: F.fold(x, (6, 6), 3)), randn(2, 18, 16)),
    "linear": (nn.Linear(8, 5), seq()),
    "bilinear": (nn.Bilinear(8, 8, 5), (seq(), seq())),
    "embedding": (nn.Embedding(20, 6), torch.randint(0, 20, (3, 7))),
    "embedding_pad": (nn.Embedding(20, 6, padding_idx=0), torch.randint(0, 20, (3, 7))),
    "embedding_bag": (nn.EmbeddingBag(20, 6, mode="mean"), torch.randint(0, 20, (3, 7))),
    "embedding_bag_sum": (nn.EmbeddingBag(20, 6, mode="sum"), (torch.randint(0, 20, (12,)), torch.tensor([0, 4, 7]))),
    "batchnorm1d": (nn.BatchNorm1d(8), randn(6, 8)),
    "batchnorm2d": (nn.BatchNorm2d(4), img()),
    "batchnorm2d_eval": (nn.BatchNorm2d(4).eval(), img()),
    "batchnorm2d_nostats": (nn.BatchNorm2d(4, track_running_stats=False), img()),
    "batchnorm3d": (nn.BatchNorm3d(3), vol()),
    "local_response_norm": (Fn(nn.LocalResponseNorm(3)), img()),
    "layernorm": (nn.LayerNorm(8), seq()),
    "layernorm2": (nn.LayerNorm((10, 8)), seq()),
    "groupnorm": (nn.GroupNorm(2, 4), img()),
    "instancenorm": (nn.InstanceNorm2d(4, affine=True), img()),
    "rmsnorm": (nn.RMSNorm(8), seq()),
    "maxpool1d": (Fn(lambda x: F.max_pool1d(x, 3, 2, 1)), randn(2, 4, 11)),
    "maxpool2d": (Fn(lambda x: F.max_pool2d(x, 3, 2, 1)), img()),
    "maxpool2d_dil": (Fn(lambda x: F.max_pool2d(x, 3, 2, 1, dilation=2)), img()),
    "maxpool2d_ceil": (Fn(lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True)), img()),
    "maxpool3d": (Fn(lambda x: F.max_pool3d(x, 2, 2)), vol()),
    "avgpool1d": (Fn(lambda x: F.avg_pool1d(x, 3, 2, 1)), randn(2, 4, 11)),
    "avgpool2d": (Fn(lambda x: F.avg_pool2d(x, 3, 2, 1)), img()),
    "avgpool2d_nopad": (Fn(lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)), img()),
    "avgpool2d_ceil": (Fn(lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False)), img()),
    # The gradient of its factor would otherwise be a sum that cancels to a ten-thousandth of its terms.
    "avgpool3d": (Fn(lambda x: F.avg_pool3d(x, 2, 2)), vol() + 0.5),
    "avgpool3d_pad": (Fn(lambda x: F.avg_pool3d(x, 3, 2, 1, count_include_pad=False)), vol()),
    "adaptive_avg1": (Fn(lambda x: F.adaptive_avg_pool2d(x, 1)), img()),
    "adaptive_avg": (Fn(lambda x: F.adaptive_avg_pool2d(x, (3, 4))), img()),
    "adaptive_avg_uneven": (Fn(lambda x: F.adaptive_avg_pool2d(x, (5, 7))), img()),
    "adaptive_max": (Fn(lambda x: F.adaptive_max_pool2d(x, (3, 4))), img()),
    "adaptive_max_uneven": (Fn(lambda x: F.adaptive_max_pool2d(x, (5, 7))), img()),
    "adaptive_max1d": (Fn(lambda x: F.adaptive_max_pool1d(x, 4)), randn(2, 4, 11)),
    "adaptive_max3d": (Fn(lambda x: F.adaptive_max_pool3d(x, 2)), vol()),
    "lppool": (Fn(lambda x: F.lp_pool2d(x, 2, 2)), img()),
    "pad_const": (Fn(lambda x: F.pad(x, (1, 2, 0, 1), value=0.5)), img()),
    "pad_reflect": (Fn(lambda x: F.pad(x, (1, 2, 3, 1), mode="reflect")), img()),
    "pad_replicate": (Fn(lambda x: F.pad(x, (1, 2, 3, 1), mode="replicate")), img()),
    "pad_replicate1d": (Fn(lambda x: F.pad(x, (1, 2), mode="replicate")), randn(2, 4, 11)),
    "pad_replicate3d": (Fn(lambda x: F.pad(x, (1, 2, 1, 0, 2, 1), mode="replicate")), vol()),
    "pad_circular": (Fn(lambda x: F.pad(x, (1, 2, 3, 1), mode="circular")), img()),
    "interp_nearest": (Fn(lambda x: F.interpolate(x, scale_factor=2)), img()),
    "interp_bilinear": (Fn(lambda x: F.interpolate(x, size=(17, 19), mode="bilinear")), img()),
    "interp_bilinear_ac": (Fn(lambda x: F.interpolate(x, size=(17, 19), mode="bilinear", align_corners=True)), img()),
    "interp_bicubic": (Fn(lambda x: F.interpolate(x, size=(17, 19), mode="bicubic")), img()),
    "pixel_shuffle": (Fn(lambda x: F.pixel_shuffle(x, 2)), img()),
    "grid_sample": (Fn(lambda x, g: F.grid_sample(x, g, align_corners=False)), (img(), torch.rand(2, 5, 5, 2) * 2 - 1)),
    "affine_grid": (
        Fn(
            lambda t, x: F.grid_sample(
                x, F.affine_grid(t, (2, 4, 5, 5), align_corners=False), align_corners=False, padding_mode="border"
            )
        ),
        (randn(2, 2, 3) * 0.3, img()),
    ),
    "grid_sample_nearest": (
        Fn(lambda x, g: F.grid_sample(x, g, mode="nearest", align_corners=True)),
        (img(), torch.rand(2, 5, 5, 2) * 2 - 1),
    ),
    "weight_norm": (nn.utils.parametrizations.weight_norm(nn.Linear(8, 5)), seq()),
    "weight_norm_old": (nn.utils.weight_norm(nn.Conv2d(4, 6, 3)), img()),
    "interp_nearest_size": (Fn(lambda x: F.interpolate(x, size=(17, 7))), img()),
    "interp_nearest_exact": (Fn(lambda x: F.interpolate(x, size=(17, 7), mode="nearest-exact")), img()),
    "interp_linear": (Fn(lambda x: F.interpolate(x, scale_factor=2.5, mode="linear")), randn(2, 4, 11)),
    "interp_trilinear": (Fn(lambda x: F.interpolate(x, scale_factor=2, mode="trilinear")), randn(1, 2, 4, 4, 4)),
    "interp_nearest_both": (Fn(lambda x: F.interpolate(x, scale_factor=(2, 1.5), recompute_scale_factor=True)), img()),
    "interp_down": (Fn(lambda x: F.interpolate(x, scale_factor=0.5, mode="bicubic", align_corners=True)), img()),
    "interp_area": (Fn(lambda x: F.interpolate(x, size=(5, 5), mode="area")), img()),
    "interp_antialias": (
        Fn(lambda x: F.interpolate(x, size=(5, 17), mode="bilinear", antialias=True)),
        img(),
    ),
    "interp_bicubic_antialias": (
        Fn(lambda x: F.interpolate(x, scale_factor=0.6, mode="bicubic", antialias=True, align_corners=True)),
        img(),
    ),
    "pixel_unshuffle": (Fn(lambda x: F.pixel_unshuffle(x, 2)), img()),
    "channel_shuffle": (Fn(lambda x: F.channel_shuffle(x, 2)), img()),
    "max_unpool": (Fn(lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)), img()),
    "avgpool2d_divisor": (Fn(lambda x: F.avg_pool2d(x, 3, 2, divisor_override=5)), img()),
    "adaptive_avg3d": (Fn(lambda x: F.adaptive_avg_pool3d(x, (2, 3, 4))), vol() + 0.5),
    # torch gives a mean over a channels-last image strides of its own
    "adaptive_avg_channels_last": (Fn(lambda x: F.adaptive_avg_pool2d(x.permute(0, 3, 1, 2), 1)), img()),
    "spectral_norm": (nn.utils.parametrizations.spectral_norm(nn.Linear(8, 5)), seq()),
    "mha": (nn.MultiheadAttention(8, 2, batch_first=True), (seq(),) * 3),
    "mha_masked": (
        Masked(
            lambda attend, x, hidden: attend(
                x, x, x, attn_mask=torch.ones(10, 10).tril() == 0, key_padding_mask=hidden, need_weights=False
            )[0]
        ),
        (seq(), torch.arange(10).repeat(2, 1) > torch.tensor([[9], [6]])),
    ),
    "mha_weights": (
        nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True, kdim=6, vdim=5),
        (seq(), randn(2, 7, 6), randn(2, 7, 5)),
    ),
    "encoder_layer": (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), seq()),
    "encoder_prenorm": (
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True, activation="gelu"),
        seq(),
    ),
    "transformer": (nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True), (seq(), seq())),
    "decoder_layer": (nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True), (seq(), seq())),
    "sdpa_causal": (Fn(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True)), randn(2, 2, 10, 8)),
    "sdpa_mask": (  # 0.5 as for avgpool3d: on some processors the sum of its factor cancelled to nothing
        Fn(lambda x, m: F.scaled_dot_product_attention(x, x, x, attn_mask=m)),
        (randn(2, 2, 10, 8) + 0.5, torch.rand(10, 10) > 0.2),
    ),
    "sdpa_grouped": (
        Fn(lambda q, k: F.scaled_dot_product_attention(q, k, k, scale=0.3, enable_gqa=True)),
        (randn(2, 4, 10, 8), randn(2, 2, 10, 8)),
    ),
    "lstm": (nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True), seq()),
    "gru": (nn.GRU(8, 6, batch_first=True), seq()),
    "rnn": (nn.RNN(8, 6, batch_first=True), seq()),
    "lstm_dropout": (nn.LSTM(8, 6, 2, dropout=0.2, proj_size=3, batch_first=True), seq()),
    "lstmcell": (nn.LSTMCell(8, 6), randn(3, 8)),
    "dropout": (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)), seq()),
    "dropout2d": (nn.Sequential(nn.Conv2d(4, 16, 1), nn.Dropout2d(0.3)), randn(8, 4, 12, 12)),
    "alpha_dropout": (nn.Sequential(nn.Linear(8, 8), nn.AlphaDropout(0.3)), seq()),
    "gaussian_noise": (Fn(lambda x: x + torch.randn_like(x)), seq()),
    "bernoulli": (Fn(lambda x, p: x * torch.bernoulli(p)), (randn(8, 10, 8), torch.rand(8, 10, 8))),
    "randint": (Fn(lambda x: x * torch.randint(0, 5, (2, 10, 8))), seq()),
    "normal": (Fn(lambda x: torch.distributions.Normal(x, x.exp()).rsample()), seq()),
    "normal_log_prob": (Fn(lambda x: torch.distributions.Normal(x, x.exp()).log_prob(torch.zeros(()))), seq()),
    "categorical": (
        Fn(lambda x, a: torch.distributions.Categorical(logits=x).log_prob(a)),
        (randn(6, 8), torch.randint(0, 8, (6,))),
    ),
    "cumsum": (Fn(lambda x: x.cumsum(1)), seq()),
    "logcumsumexp": (Fn(lambda x: x.logcumsumexp(1)), seq()),
    "cummax": (Fn(lambda x: x.cummax(1)[0]), seq()),
    "cumprod": (Fn(lambda x: x.cumprod(1)), seq()),
    "cdist": (Fn(lambda x, y: torch.cdist(x, y)), (seq(), randn(2, 7, 8))),
    "cdist1": (Fn(lambda x, y: torch.cdist(x, y, p=1)), (seq(), randn(2, 7, 8))),
    "pdist": (Fn(lambda x: F.pdist(x)), randn(6, 8)),
    "cosine_sim": (Fn(lambda x, y: F.cosine_similarity(x, y, dim=-1)), (seq(), seq())),
    "pairwise": (Fn(lambda x, y: F.pairwise_distance(x, y)), (randn(4, 8), randn(4, 8))),
    "einsum": (Fn(lambda x, y: torch.einsum("bij,bkj->bik", x, y)), (seq(), seq())),
    "sort": (Fn(lambda x: x.sort(1)[0]), seq()),
    "topk": (Fn(lambda x: x.topk(3, 1)[0]), seq()),
    "max_dim": (Fn(lambda x: x.max(1)[0]), seq()),
    "amax": (Fn(lambda x: x.amax(1)), seq()),
    "median": (Fn(lambda x: x.median(1)[0]), seq()),
    "kthvalue": (Fn(lambda x: x.kthvalue(2, 1)[0]), seq()),
    "cummin": (Fn(lambda x: x.cummin(1)[0]), seq()),
    "median_all": (Fn(lambda x: x.median()), seq()),
    "quantile": (Fn(lambda x: x.quantile(0.3, dim=1)), seq()),
    "max_all": (Fn(lambda x: x.max()), seq()),
    "var": (Fn(lambda x: x.var(1)), seq()),
    "std": (Fn(lambda x: x.std((0, 2))), seq()),
    "norm": (Fn(lambda x: x.norm(dim=1)), seq()),
    "logsumexp": (Fn(lambda x: x.logsumexp(1)), seq()),
    "prod": (Fn(lambda x: x.prod(1)), seq()),
    "softmax": (Fn(lambda x: x.softmax(1)), seq()),
    "log_softmax": (Fn(lambda x: x.log_softmax(-1)), seq()),
    "gumbel": (Fn(lambda x: F.gumbel_softmax(x)), seq()),
    "normalize": (Fn(lambda x: F.normalize(x, dim=1)), seq()),
    "where": (Fn(lambda x, y: torch.where(x > y, x * 2, y * x)), (seq(), seq())),
    "masked_fill": (Fn(lambda x, y: x.masked_fill(y > 0, -2.0)), (seq(), seq())),
    "gather": (Fn(lambda x, i: x.gather(1, i)), (seq(), torch.randint(0, 10, (2, 4, 8)))),
    "scatter_add": (
        Fn(lambda x, i: torch.zeros(2, 6, 8).scatter_add(1, i, x)),
        (seq(), torch.randint(0, 6, (2, 10, 8))),
    ),
    "index_select": (Fn(lambda x, i: x.index_select(1, i)), (seq(), torch.tensor([1, 3, 3]))),
    "index_adv": (Fn(lambda x, i, j: x[i, j]), (seq(), torch.tensor([0, 1, 1]), torch.tensor([2, 2, 5]))),
    "scatter_mean": scattered("mean", torch.zeros),
    "scatter_mean_without": scattered("mean", torch.ones, include_self=False),
    "scatter_amax": scattered("amax", torch.zeros),
    "scatter_amax_without": scattered("amax", torch.ones, include_self=False),
    "masked_scatter": (Fn(lambda x, m: torch.ones(4, 5).masked_scatter(m, x)), (randn(4, 5), torch.rand(4, 5) > 0.5)),
    "index_put_add": (
        Fn(lambda x, i: torch.zeros(5, 8).index_put((i,), x, accumulate=True)),
        (randn(6, 8), torch.tensor([0, 1, 1, 4, 0, 2])),
    ),
    "slice_assigned": (Fn(lambda x: x.slice_scatter(x[:, 5:8] * 2, 1, 2, 5)), seq()),
    "as_strided": (Fn(lambda x: x.as_strided((3, 4), (8, 2), 1)), seq()),
    "as_strided_windows": (Fn(lambda x: x.as_strided((7, 4), (1, 1))), randn(10)),
    "diagonal": (Fn(lambda x: x.diagonal(1, 1, 2) * 2), randn(2, 4, 6)),
    "diagonal_tall": (Fn(lambda x: x.diagonal(-1, 0, 2) * 2), randn(7, 2, 4)),
    "diagonal_assigned": (Fn(lambda x, y: x.diagonal_scatter(y, 1)), (randn(4, 6), randn(4))),
    "einsum_diagonal": (Fn(lambda x: torch.einsum("ii->i", x)), randn(5, 5)),
    "index_put": (
        Fn(
            lambda x, i: x.index_put(
                (i,),
                torch.ones(()),
            )
        ),
        (randn(6, 8), torch.tensor([1, 3])),
    ),
    "index_add": (
        Fn(lambda x, i: torch.zeros(4, 8).index_add(0, i, x)),
        (randn(6, 8), torch.tensor([1, 3, 0, 1, 2, 3])),
    ),
    "roll": (Fn(lambda x: x.roll(2, 1)), seq()),
    "flip": (Fn(lambda x: x.flip(1)), seq()),
    "tril": (Fn(lambda x: x.tril()), seq()),
    "cat_split": (Fn(lambda x: torch.cat([x.split(3, 1)[1], x.chunk(2, 1)[0]], 1)), seq()),
    "stack": (Fn(lambda x: torch.stack([x, x * 2], 1)), seq()),
    "repeat": (Fn(lambda x: x.repeat(1, 2, 1)), seq()),
    "repeat_interleave": (Fn(lambda x: x.repeat_interleave(2, 1)), seq()),
    "expand": (Fn(lambda x: x[:, :1].expand(-1, 5, -1) * 2), seq()),
    "strided_slice": (Fn(lambda x: x[:, 1:9:2, ::3]), seq()),
    "unfold_t": (Fn(lambda x: x.unfold(1, 3, 2)), seq()),
    "bmm": (Fn(lambda x, y: x.bmm(y.transpose(1, 2))), (seq(), seq())),
    "baddbmm": (
        Fn(lambda x, y: torch.baddbmm(x.new_ones(2, 10, 10), x, y.transpose(1, 2), beta=0.5, alpha=2)),
        (seq(), seq()),
    ),
    "matmul1d": (Fn(lambda x, y: x @ y), (seq(), randn(8))),
    "attention_pool": (AttentionPool(), seq()),
    "added_amax": (AddedMaximum(), randn(3, 4)),
    "pad_maxpool": (Fn(lambda x: x * F.max_pool2d(F.pad(-img().abs() - 1, (1, 1, 1, 1)), 3, 1)), img()),
    "outer": (Fn(lambda x, y: torch.outer(x, y)), (randn(4), randn(5))),
    "pow": (Fn(lambda x: x.abs().pow(1.7)), seq()),
    "pow_t": (Fn(lambda x, y: x.exp().pow(y)), (seq(), seq())),
    "atan2": (Fn(lambda x, y: torch.atan2(x, y)), (seq(), seq())),
    "lerp": (Fn(lambda x, y: torch.lerp(x, y, 0.3)), (seq(), seq())),
    "addcmul": (Fn(lambda x, y: torch.addcmul(x, x, y, value=0.5)), (seq(), seq())),
    "hypot": (Fn(torch.hypot), (seq(), seq())),
    "fmax": (Fn(lambda x, y: torch.fmax(x, y) + torch.fmin(x, 2 * y)), (seq(), seq())),
    "logaddexp": (Fn(torch.logaddexp), (seq(), seq())),
    "clamp": (Fn(lambda x: x.clamp(-0.5, 0.7)), seq()),
    "fmod": (Fn(lambda x: x.remainder(0.7)), seq()),
    "trig": (Fn(lambda x: x.sin() + x.cos() + x.tan() + x.atan() + x.sinh() + x.cosh() + x.asinh()), seq()),
    "explog": (
        Fn(
            lambda x: (
                x.exp()
                + x.abs().log1p()
                + x.expm1()
                + x.abs().sqrt()
                + (x * x + 1).rsqrt()
                + (x * x + 1).log2()
                + x.sigmoid().logit()
            )
        ),
        seq(),
    ),
    "erf": (Fn(lambda x: x.erf() + x.erfc() + x.sigmoid() + x.tanh() + x.reciprocal()), seq()),
}
for a in (
    "relu",
    "relu6",
    "leaky_relu",
    "elu",
    "selu",
    "celu",
    "gelu",
    "silu",
    "mish",
    "hardswish",
    "hardsigmoid",
    "hardtanh",
    "softplus",
    "softsign",
    "tanhshrink",
    "logsigmoid",
    "hardshrink",
    "softshrink",
    "threshold",
):
    f = (lambda x: F.threshold(x, 0.1, 0.2)) if a == "threshold" else getattr(F, a)
    CASES["act_" + a] = (Fn(f), seq())
CASES["gelu_tanh"] = (Fn(lambda x: F.gelu(x, approximate="tanh")), seq())
CASES["glu"] = (Fn(lambda x: F.glu(x)), seq())
CASES["prelu"] = (nn.PReLU(4), img())
for n, f, x, t in [
    ("ce", F.cross_entropy, randn(6, 8), torch.randint(0, 8, (6,))),
    ("ce_smooth", lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), randn(6, 8), torch.randint(0, 8, (6,))),
    ("ce_ignore", lambda x, t: F.cross_entropy(x, t, ignore_index=3), randn(16, 8), torch.randint(0, 8, (16,))),
    (
        "ce_weight",
        lambda x, t: F.cross_entropy(x, t, weight=torch.linspace(0.1, 1, 8)),
        randn(16, 8),
        torch.randint(0, 8, (16,)),
    ),
    ("ce_prob", F.cross_entropy, randn(6, 8), randn(6, 8).softmax(1)),
    ("ce2d", F.cross_entropy, randn(2, 8, 5, 5), torch.randint(0, 8, (2, 5, 5))),
    ("ce_sum", lambda x, t: F.cross_entropy(x, t, reduction="sum"), randn(6, 8), torch.randint(0, 8, (6,))),
    ("ce_none", lambda x, t: F.cross_entropy(x, t, reduction="none"), randn(6, 8), torch.randint(0, 8, (6,))),
    ("mse", F.mse_loss, seq(), seq()),
    ("l1", F.l1_loss, seq(), seq()),
    ("smooth_l1", F.smooth_l1_loss, seq(), seq()),
    ("huber", F.huber_loss, seq(), seq()),
    ("bce", lambda x, t: F.binary_cross_entropy(x.sigmoid(), t), seq(), torch.rand(2, 10, 8)),
    ("bcel", F.binary_cross_entropy_with_logits, seq(), torch.rand(2, 10, 8)),
    ("kl", lambda x, t: F.kl_div(x.log_softmax(-1), t, reduction="batchmean"), seq(), randn(2, 10, 8).softmax(-1)),
    ("nll", lambda x, t: F.nll_loss(x.log_softmax(1), t), randn(6, 8), torch.randint(0, 8, (6,))),
    ("poisson", F.poisson_nll_loss, seq(), seq().exp()),
    ("triplet", lambda x, t: F.triplet_margin_loss(x, t, t.flip(0)), randn(6, 8), randn(6, 8)),
    (
        "cosemb",
        lambda x, t: F.cosine_embedding_loss(x, t, torch.tensor([1, -1, 1, 1, -1, 1])),
        randn(6, 8),
        randn(6, 8),
    ),
    ("multimargin", F.multi_margin_loss, randn(6, 8), torch.randint(0, 8, (6,))),
    ("gaussian_nll", lambda x, t: F.gaussian_nll_loss(x, t, x.exp()), seq(), seq()),
    ("gaussian_nll_full", lambda x, t: F.gaussian_nll_loss(x, t, torch.full((2, 10), 0.3), full=True), seq(), seq()),
    ("multilabel_soft", F.multilabel_soft_margin_loss, randn(6, 8), torch.randint(0, 2, (6, 8)).float()),
    (
        "ctc",
        lambda x, t: F.ctc_loss(x.log_softmax(-1), t, torch.tensor([9, 8, 9]), torch.tensor([3, 2, 0])),
        randn(9, 3, 7),
        torch.tensor([[1, 1, 2], [3, 4, 0], [0, 0, 0]]),
    ),
    (
        "ctc_impossible",
        lambda x, t: F.ctc_loss(x.log_softmax(-1), t, (9, 2), (3, 3), blank=6, reduction="sum", zero_infinity=True),
        randn(9, 2, 7),
        torch.randint(0, 6, (2, 3)),
    ),
    ("hinge", lambda x, t: F.hinge_embedding_loss(x, t), randn(6, 8), torch.randn(6, 8).sign()),
    ("softmargin", F.soft_margin_loss, randn(6, 8), torch.randn(6, 8).sign()),
]:
    CASES["loss_" + n] = (Fn(f), (x, t))

CASES |= {
    "amax_of_all": (Fn(lambda x: x.amax() - x.amin(keepdim=True)), seq()),
    "nearest_rows": (Fn(lambda x: torch.cdist(x, x).topk(3, largest=False)[0]), randn(30, 4)),
    "matrix_exp": (Fn(lambda x: torch.matrix_exp(x) - torch.linalg.matrix_exp(x.mT)), randn(2, 5, 5)),
    "rrelu": (Fn(lambda x: F.rrelu(x, training=True)), seq()),
}

NUMBER = torch.tensor(1.5)
NUMBERS = {
    "max_of_number": lambda x: x.max(0)[0],
    "topk_of_number": lambda x: x.topk(1)[0],
    "gather_of_number": lambda x: x.gather(0, torch.tensor([0, 0, 0])),
    "scatter_to_number": lambda x: torch.zeros(()).scatter(0, torch.tensor(0), x),
    "scatter_sum_to_number": lambda x: torch.ones(()).scatter_reduce(0, torch.tensor(0), x, "sum") * x,
    "squeeze_of_number": lambda x: x.squeeze((0,)),
}
"""Functions along the axis that a single number does not have: torch takes it as a row of one."""

CASES |= {name: (Fn(f), NUMBER) for name, f in NUMBERS.items()} | {
    "squeeze_nothing": (Fn(lambda x: x.squeeze((0, 2))), seq()),
    "take": (Fn(lambda x: x.take(torch.tensor([[3, -1], [3, 77]]))), seq()),
    "put": (Fn(lambda x: x.put(torch.tensor([3, -1, 77]), x[0, 1, 3:6])), seq()),
    "put_more": (Fn(lambda x: x.put(torch.tensor([3, -1, 3]), x[0, 1, 3:6], accumulate=True)), seq()),
    "index_reduce": (Fn(lambda x: x.index_reduce(1, torch.tensor([2, 1, 2]), x[:, :3] * 2, "mean")), seq()),
    "stable_sort": (Fn(lambda x: x.relu().sort(dim=1, descending=True, stable=True)[0]), seq()),
    "repeats": (Fn(lambda x: x.repeat_interleave(torch.arange(10) % 3, 1, output_size=9)), seq()),
    "copysign": (Fn(lambda x, s: x.copysign(s) + x.copysign(-2.0)), (seq(), seq())),
    "sign_of_zeros": (Fn(lambda x: x.copysign(torch.tensor([0.0, -0.0, 1.0, -1.0]))), randn(4)),
    "soft_margin_far": (Fn(lambda x: F.soft_margin_loss(x, torch.tensor(1.0))), torch.tensor(12.0)),
}
"""What torch's own tests of its operators showed."""
CASES["encoder_masked"] = (
    nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 1),
    (seq(), nn.Transformer.generate_square_subsequent_mask(10)),
)
if hasattr(F, "linear_cross_entropy"):
    chunked = nn.LinearCrossEntropyOptions(batch_chunk_size=4)
    made = nn.LinearCrossEntropyLoss(8, 20, bias=True, ignore_index=3, options=chunked)
    CASES["linear_cross_entropy"] = (made, (randn(16, 8), torch.randint(0, 20, (16,))))

REFUSED = {
    "fft": (Fn(lambda x: torch.fft.rfft(x).abs()), seq()),
    "batchnorm.py": (nn.BatchNorm2d(4, momentum=None), img()),  # where Python reads a counter
    "fractional_max_pool2d": (Fn(lambda x: F.fractional_max_pool2d(x, 2, output_size=5)), img()),
    "erf_inv": (Fn(lambda x: torch.erfinv(x.tanh())), seq()),
    "linalg": (Fn(lambda x: torch.linalg.cholesky(x @ x.T + torch.eye(4))), randn(4, 4)),
    "nonzero": (Fn(lambda x: x[x > 0]), seq()),
}
"""What there is no rule for, by what the error names."""

SLOW = (
    "lstm", "gru", "rnn", "lstmcell", "encoder_layer", "decoder_layer", "convT3d", "conv3d", "interp_bicubic", "trig",
    "explog", "affine_grid", "grid_sample", "avgpool3d_pad", "adaptive_max3d", "spectral_norm", "pdist", "cdist1",
    "lstm_dropout", "encoder_prenorm", "transformer", "loss_ctc", "interp_trilinear", "interp_linear", "quantile",
)  # fmt: skip


def export(names):
    """The cases as one checked step."""
    from onnx_remat.converters.pytorch import export_training_step

    return export_training_step(Group(names), torch.ones(()))


def main():
    """Export every case by itself; print what failed."""
    failed = 0
    for name in CASES:
        try:
            export([name])
        except Exception as error:
            failed += 1
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
    print(f"{len(CASES) - failed} of {len(CASES)} cases pass")


if __name__ == "__main__":
    main()
