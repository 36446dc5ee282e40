"""A causal language model of pre-norm transformer blocks."""

from __future__ import annotations

import onnx
import onnx_graphsurgeon as gs

import sample_models.layers  # noqa: F401  (registers the layers)
from sample_models.step import TrainingGraph


def block(graph: TrainingGraph, x: gs.Variable, length: int, heads: int) -> gs.Variable:
    """Attention and a GELU perceptron, each behind a layer norm and around a shortcut."""
    x = graph.residual(x, graph.self_attention(graph.layer_norm(x, "norm.0"), "attention", length, heads))
    width = x.shape[1]
    hidden = graph.gelu(graph.linear(graph.layer_norm(x, "norm.1"), "mlp.0", 4 * width))
    return graph.residual(x, graph.linear(hidden, "mlp.1", width))


def build(
    blocks: int = 4, width: int = 128, heads: int = 4, batch: int = 8, length: int = 128, tokens: int = 512
) -> onnx.ModelProto:
    """Token and position embeddings, the blocks, a final norm, a linear head, cross-entropy per token."""
    graph = TrainingGraph("attention_stack")
    sequence = graph.batch_input(0, (batch, length), below=tokens)
    targets = graph.batch_input(1, (batch, length), below=tokens)
    x = graph.embedding(graph.reshaped(sequence, (batch * length,)), "token", tokens, width)
    x = graph.positioned(x, "position", length)
    for index in range(blocks):
        with graph.scope(f"block.{index}"):
            x = block(graph, x, length, heads)
    logits = graph.linear(graph.layer_norm(x, "norm"), "head", tokens)
    loss = graph.cross_entropy(logits, graph.reshaped(targets, (batch * length,)))
    return graph.finish(loss, learning_rate=0.05)
