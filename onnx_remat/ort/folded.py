"""Transposes that ONNX Runtime folds into the products that read them: FusedMatMul reads its operands transposed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from onnx_remat.memory.problem import Problem
from onnx_remat.ort.prepare import Compiled


def with_folded_transposes(problem: Problem, compiled: Compiled, executed: Compiled) -> Problem:
    """Return the problem of a step in which Transposes that ONNX Runtime folds away are views of their inputs.

    A Transpose is folded if only products read it, and the graph that ONNX Runtime executes has no such value. A view
    takes at most the memory of a Transpose that is not folded after all, so that bounds for this problem hold for both.
    State that the step overwrites has no such views: an update may run before a product that reads a copy.

    Parameters
    ----------
    problem : Problem
        Of `compiled`.
    compiled, executed : Compiled
        The step as it is planned, and as ONNX Runtime executes it.
    """
    graph, alias = compiled.graph, problem.alias_slot.copy()
    left = executed.graph.values
    life = problem.lifetimes
    number = {name: i for i, name in enumerate(graph.values)}
    for at, op in enumerate(graph.ops):
        if op.node.op_type != "Transpose" or op.node.domain or op.outputs[0] in left:
            continue
        value = number[op.outputs[0]]
        readers = life.readers[life.reader_ptr[value] : life.reader_ptr[value + 1]]
        read = int(problem.in_values[problem.in_ptr[at]])
        if life.renewed_by[life.root[read]] >= 0:
            continue
        if len(readers) and all(graph.ops[reader].node.op_type == "MatMul" for reader in readers.tolist()):
            alias[problem.out_ptr[at]] = 0
    return replace(problem, alias_slot=alias) if np.any(alias != problem.alias_slot) else problem
