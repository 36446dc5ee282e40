"""A second simulator, written from the rules alone: slow and plain, the oracle of the first."""

from __future__ import annotations

from onnx_remat.memory.problem import Problem


def naive_steps(problem: Problem, order: list[int]) -> list[int]:
    """Bytes per step by the rules in `onnx_remat.memory.buffers`, with lists and dicts."""
    latest: dict[int, int] = {}
    value_of: list[int] = []
    reads_at: list[list[int]] = []
    made_at: list[list[int]] = []
    first: list[bool] = []
    for op in order:
        reads_at.append([latest.get(v, -1) for v in problem.inputs(op)])
        made_at.append([])
        for v in problem.outputs(op):
            first.append(v not in latest)
            latest[v] = len(value_of)
            made_at[-1].append(len(value_of))
            value_of.append(v)
    total_reads = [sum(r.count(i) for r in reads_at) for i in range(len(value_of))]
    buffers: list[dict[str, int]] = []  # owner, size, start, end, open reads, held
    home: dict[int, int] = {}
    dead: list[int] = []  # buffers to take over, most recently freed last
    for step, op in enumerate(order):
        inputs, read = problem.inputs(op), reads_at[step]
        for slot, inst in zip(range(problem.out_ptr[op], problem.out_ptr[op + 1]), made_at[step], strict=True):
            v = value_of[inst]
            dropped = not total_reads[inst] and problem.droppable[slot] > first[inst]
            if len(problem.donates) and problem.donates[v] >= 0:
                continue
            kind = int(problem.shape_class[v])
            held = bool(problem.is_output[v] and first[inst])
            chosen = None
            if not held and problem.alias_slot[slot] >= 0:
                source = read[problem.alias_slot[slot]]
                if source < 0 or source not in home:
                    continue
                chosen = home[source]
            elif not held and kind >= 0:
                for k in problem.inplace_slots[problem.inplace_ptr[slot] : problem.inplace_ptr[slot + 1]]:
                    b = home.get(read[k], -1)
                    free = b >= 0 and not buffers[b]["held"] and buffers[b]["open"] == 1
                    if free and problem.shape_class[inputs[k]] == kind:
                        chosen = b
                        break
                if chosen is None and problem.poolable[v] and (total_reads[inst] or dropped):
                    same = [b for b in dead if problem.shape_class[buffers[b]["owner"]] == kind]
                    if same:
                        chosen = same[-1]
                        dead.remove(chosen)
            if chosen is None:
                chosen = len(buffers)
                buffers.append(
                    {
                        "owner": v,
                        "size": int(problem.nbytes[v]),
                        "start": step,
                        "end": -1,
                        "open": 0,
                        "held": held,
                    }
                )
            home[inst] = chosen
            if dropped:
                buffers[chosen]["end"] = step
            buffers[chosen]["open"] += total_reads[inst] + 1
        closing = [home[i] for i in read if i in home]
        for b in closing:
            buffers[b]["end"] = step
        for b in closing + [home[i] for i in made_at[step] if i in home]:
            buffers[b]["open"] -= 1
            owner = buffers[b]["owner"]
            shared = problem.poolable[owner] and problem.shape_class[owner] >= 0
            if shared and not buffers[b]["open"] and not buffers[b]["held"]:
                dead.append(b)
    result = [problem.base_bytes + int(problem.workspace[op]) for op in order]
    for step, op in enumerate(order):
        if op in order[:step]:
            result[step] += int(problem.rerun_workspace[op])
    for b in buffers:
        end = b["end"] if b["end"] >= 0 else (len(order) - 1 if problem.hold_unread else b["start"])
        for step in range(b["start"], (len(order) - 1 if b["held"] else end) + 1):
            result[step] += b["size"]
    return result
