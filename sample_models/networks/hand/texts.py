"""Networks over tokens: recurrent ones, attention, mixtures of experts, labels of sequences."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from .case import Case, mlp, network

WORDS, TEXTS, LENGTH, WIDTH, TAGS = 64, 8, 24, 48, 6


def tokens() -> torch.Tensor:
    """A batch of texts."""
    return torch.randint(1, WORDS, (TEXTS, LENGTH))


def language(model: nn.Module) -> Case:
    """A model that scores the next word at every place, as (places, words)."""
    return Case(model, lambda: (tokens(), tokens().flatten()))


class Recurrent(nn.Module):
    """Embedding, two recurrent layers, scores at every place."""

    def __init__(self, kind: Callable[..., nn.Module], out: int = WORDS, bidirectional: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = kind(WIDTH, WIDTH, 2, batch_first=True, bidirectional=bidirectional)
        self.out = nn.Linear(WIDTH * (1 + bidirectional), out)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Scores as (places, classes)."""
        return self.out(self.layers(self.embedding(words))[0]).flatten(0, 1)


@network("LSTM language model")
def lstm() -> Case:
    return language(Recurrent(nn.LSTM))


@network("GRU language model")
def gru() -> Case:
    return language(Recurrent(nn.GRU))


@network("Elman RNN language model")
def rnn() -> Case:
    return language(Recurrent(nn.RNN))


@network("bidirectional LSTM tagger")
def tagger() -> Case:
    model = Recurrent(nn.LSTM, TAGS, bidirectional=True)
    return Case(model, lambda: (tokens(), torch.randint(0, TAGS, (TEXTS * LENGTH,))))


class Packed(nn.Module):
    """A GRU over texts of lengths of their own, packed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.out = nn.Linear(WIDTH, TAGS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Scores of the text."""
        lengths = list(range(LENGTH, LENGTH - TEXTS, -1))
        packed = nn.utils.rnn.pack_padded_sequence(self.embedding(words), lengths, batch_first=True)
        return self.out(self.layer(packed)[1][-1])


@network("GRU over packed texts")
def packed() -> Case:
    return Case(Packed(), lambda: (tokens(), torch.randint(0, TAGS, (TEXTS,))))


class Seq2Seq(nn.Module):
    """Bahdanau et al. 2014: at each step the decoder attends to the encoder's states; the teacher's words are fed."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.cell = nn.GRUCell(2 * WIDTH, WIDTH)
        self.query, self.key, self.score = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss."""
        states, last = self.encoder(self.embedding(source))
        hidden, made = last[0], []
        for step in range(target.shape[1] - 1):
            scores = self.score(torch.tanh(self.query(hidden)[:, None] + self.key(states)))
            context = (scores.softmax(1) * states).sum(1)
            hidden = self.cell(torch.cat([self.embedding(target[:, step]), context], -1), hidden)
            made.append(self.out(hidden))
        return F.cross_entropy(torch.stack(made, 1).flatten(0, 1), target[:, 1:].flatten())


@network("seq2seq with attention")
def seq2seq() -> Case:
    return Case(Seq2Seq(), lambda: (tokens(), tokens()[:, :12]), None)


class EncoderDecoder(nn.Module):
    """torch.nn.Transformer, with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, 96, 0.0, batch_first=True)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1] - 1)
        made = self.transformer(
            self.embedding(source), self.embedding(target[:, :-1]), tgt_mask=mask, tgt_is_causal=True,
            src_key_padding_mask=source == 1,
        )  # fmt: skip
        return F.cross_entropy(self.out(made).flatten(0, 1), target[:, 1:].flatten())


@network("Transformer, encoder and decoder")
def transformer() -> Case:
    return Case(EncoderDecoder(), lambda: (tokens(), tokens()), None)


class Encoder(nn.Module):
    """torch.nn.TransformerEncoder before a mean over places that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, padding_idx=1)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 96, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, TAGS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Scores of the text."""
        padding = words == 1
        made = self.layers(self.embedding(words), src_key_padding_mask=padding)
        real = (~padding).to(made.dtype).unsqueeze(-1)
        return self.out((made * real).sum(1) / real.sum(1).clamp(min=1))


@network("TransformerEncoder classifier")
def encoder() -> Case:
    return Case(Encoder(), lambda: (tokens(), torch.randint(0, TAGS, (TEXTS,))))


class Block(nn.Module):
    """Attention and something after it, each about a normalized residual stream."""

    def __init__(self, attention: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.attention, self.after = attention, after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The stream further on."""
        x = x + self.attention(self.norms[0](x))
        return x + self.after(self.norms[1](x))


class Causal(nn.Module):
    """Scaled dot products of four heads, looking backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As nanoGPT has it."""
        q, k, v = self.turned(self.qkv(x)).chunk(3, -1)
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(made.transpose(1, 2).flatten(2))

    def turned(self, qkv: torch.Tensor) -> torch.Tensor:
        """(N, heads, places, 3 * size)."""
        return qkv.unflatten(-1, (4, -1)).transpose(1, 2)


class ComplexRotary(Causal):
    """Queries and keys are turned by complex numbers, as in Llama's first code."""

    def turned(self, qkv: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values."""
        parts = super().turned(qkv)
        q, k, v = parts.chunk(3, -1)
        rates = 1e4 ** (-torch.arange(0, q.shape[-1], 2) / q.shape[-1])
        angles = torch.outer(torch.arange(q.shape[2]), rates)
        turn = torch.polar(torch.ones_like(angles), angles)
        q, k = (torch.view_as_real(torch.view_as_complex(each.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)
                for each in (q, k))  # fmt: skip
        return torch.cat([q, k, v], -1)


class LinearAttention(Causal):
    """Katharopoulos et al. 2020: sums of keys times values take the place of the softmax."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Prefix sums over places."""
        q, k, v = self.turned(self.qkv(x)).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("nhtd,nhte->nhtde", k, v).cumsum(2)
        made = torch.einsum("nhtd,nhtde->nhte", q, state) / (q * k.cumsum(2)).sum(-1, keepdim=True)
        return self.out(made.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Two blocks between an embedding and scores that share its weight."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks, self.norm = nn.Sequential(*blocks), nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        self.out.weight = nn.init.normal_(self.words.weight, std=0.02)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Scores as (places, words)."""
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        return self.out(self.norm(self.blocks(x))).flatten(0, 1)


def feed_forward() -> nn.Sequential:
    """The usual layer after attention."""
    return mlp(WIDTH, 4 * WIDTH, WIDTH, act=nn.GELU)


@network("nanoGPT")
def nano_gpt() -> Case:
    return language(Decoder(*(Block(Causal(), feed_forward()) for _ in range(2))))


@network("GPT, rotary by complex numbers")
def complex_rotary() -> Case:
    return language(Decoder(*(Block(ComplexRotary(), feed_forward()) for _ in range(2))))


@network("linear attention")
def linear_attention() -> Case:
    return language(Decoder(*(Block(LinearAttention(), feed_forward()) for _ in range(2))))


class Experts(nn.Module):
    """A mixture of four experts that all compute; `top` of them count, or all."""

    def __init__(self, top: int = 0) -> None:
        super().__init__()
        self.top, self.gate = top, nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(mlp(WIDTH, 96, WIDTH, act=nn.SiLU) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shares times what each expert makes."""
        shares = self.gate(x).softmax(-1)
        if self.top:
            best, which = shares.topk(self.top, -1)
            shares = torch.zeros_like(shares).scatter(-1, which, best / best.sum(-1, keepdim=True))
        made = torch.stack([expert(x) for expert in self.experts], -1)
        return (made * shares.unsqueeze(-2)).sum(-1)


class Routed(Experts):
    """Each expert computes for the tokens that chose it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens are picked by a mask."""
        which, made = self.gate(x).argmax(-1), torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            made[which == index] = expert(x[which == index])
        return made


@network("mixture of experts, dense routing")
def experts() -> Case:
    return language(Decoder(*(Block(Causal(), Experts()) for _ in range(2))))


@network("mixture of experts, best two of four")
def best_experts() -> Case:
    return language(Decoder(*(Block(Causal(), Experts(2)) for _ in range(2))))


@network("mixture of experts, tokens picked by masks")
def routed() -> Case:
    return language(Decoder(*(Block(Causal(), Routed()) for _ in range(2))))


class Perceiver(nn.Module):
    """Jaegle et al. 2021: eight learned vectors attend to the text, then to themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.latents = nn.Embedding(WORDS, WIDTH), nn.Parameter(torch.randn(8, WIDTH) * 0.02)
        self.cross = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.inner = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.out = nn.Linear(WIDTH, TAGS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Scores of the text."""
        text = self.embedding(words)
        x = self.latents.expand(len(words), -1, -1)
        for _ in range(2):
            x = x + self.cross(self.norms[0](x), text, text, need_weights=False)[0]
            y = self.norms[1](x)
            x = x + self.inner(y, y, y)[0]
        return self.out(x.mean(1))


@network("Perceiver")
def perceiver() -> Case:
    return Case(Perceiver(), lambda: (tokens(), torch.randint(0, TAGS, (TEXTS,))))


class TextCNN(nn.Module):
    """Kim 2014."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Conv1d(WIDTH, 32, width) for width in (3, 4, 5))
        self.out = nn.Linear(96, TAGS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """The largest of every filter."""
        x = self.embedding(words).transpose(1, 2)
        return self.out(torch.cat([layer(x).relu().amax(-1) for layer in self.layers], 1))


@network("TextCNN")
def text_cnn() -> Case:
    return Case(TextCNN(), lambda: (tokens(), torch.randint(0, TAGS, (TEXTS,))))


class ChainCRF(nn.Module):
    """A tagger with a linear-chain conditional random field (Lafferty et al. 2001)."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = Recurrent(nn.LSTM, TAGS, bidirectional=True)
        self.steps = nn.Parameter(torch.randn(TAGS, TAGS) * 0.1)

    def forward(self, words: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        """Negative log-likelihood of the tags."""
        scores = self.scores(words).unflatten(0, words.shape)
        path = scores.gather(2, tags[..., None]).sum((1, 2)) + self.steps[tags[:, :-1], tags[:, 1:]].sum(1)
        all_paths = scores[:, 0]
        for step in range(1, words.shape[1]):
            all_paths = (all_paths[:, :, None] + self.steps).logsumexp(1) + scores[:, step]
        return (all_paths.logsumexp(1) - path).mean()


@network("LSTM and a linear-chain CRF")
def crf() -> Case:
    return Case(ChainCRF(), lambda: (tokens(), torch.randint(0, TAGS, (TEXTS, LENGTH))), None)


class SkipGram(nn.Module):
    """Mikolov et al. 2013, with five words that are not near for each that is."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Embedding(WORDS, WIDTH), nn.Embedding(WORDS, WIDTH)

    def forward(self, words: torch.Tensor, near: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.inner(words)
        far = torch.bmm(self.outer(others), x.unsqueeze(2)).squeeze(2)
        return -F.logsigmoid((x * self.outer(near)).sum(1)).mean() - F.logsigmoid(-far).sum(1).mean()


@network("word2vec, negative samples")
def word2vec() -> Case:
    def words(*size: int) -> torch.Tensor:
        return torch.randint(0, WORDS, size)

    return Case(SkipGram(), lambda: (words(256), words(256), words(256, 5)), None)
