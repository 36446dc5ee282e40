"""Kernels in PTX as functions of the host: what a driver does for a device, for the fake one and for tests.

Of PTX this knows what LLVM writes for `onnx_remat.fuse.cuda`; anything else is an error. Every access to memory asks
``warp_at`` of warp.c, so that an address outside all allocations is found.
"""

from __future__ import annotations

import re
from typing import Any

_TYPES = {"p": "i1", "rs": "i16", "r": "i32", "rd": "i64"}
_FLOATS = {"f16": "half", "f32": "float", "f64": "double"}
_COMPARED = {"eq": "oeq", "ne": "one", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge", "equ": "ueq", "neu": "une",
             "ltu": "ult", "leu": "ule", "gtu": "ugt", "geu": "uge", "nan": "uno", "num": "ord"}  # fmt: skip
_UNSIGNED = {"lo": "ult", "ls": "ule", "hi": "ugt", "hs": "uge"}
_ROUNDED = {"rni": "roundeven", "rmi": "floor", "rpi": "ceil", "rzi": "trunc"}
_BINARY = {"add": "add", "sub": "sub", "mul": "mul", "and": "and", "or": "or", "xor": "xor", "shl": "shl"}
_UNARY = {"sqrt": "sqrt", "abs": "fabs"}
_WIDTHS = {"half": 16, "float": 32, "double": 64}
_HEAD = """declare ptr @warp_at(i64, i64)
declare i32 @warp_shuffle(i32, i32)
declare void @warp_sync()
declare void @warp_barrier()
declare ptr @warp_shared(i64, i64)
"""
FUNCTIONS = ("warp_at", "warp_shuffle", "warp_sync", "warp_barrier", "warp_shared")
"""Of warp.c, which translated kernels call."""


def exchanges(ptx: str) -> bool:
    """Whether threads exchange values."""
    return "shfl." in ptx or "bar." in ptx


def _bits(kind: str) -> int:
    return _WIDTHS[kind] if kind in _WIDTHS else int(kind[1:])


class _Translation:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.declared: set[str] = set()
        self.count = 0

    def new(self, text: str) -> str:
        self.count += 1
        self.lines.append(f"%v{self.count} = {text}")
        return f"%v{self.count}"

    def read(self, operand: str, kind: str) -> str:
        """The value of an operand as an LLVM type."""
        whole = f"i{_bits(kind)}"
        if operand.startswith(("%tid", "%ctaid", "%ntid")):
            return "%" + operand[1:].partition(".")[0]
        if operand.startswith("%"):
            own = _TYPES[re.sub(r"\d+$", "", operand[1:])]
            value = self.new(f"load {own}, ptr %R{operand[1:]}")
            if _bits(own) != _bits(whole):
                value = self.new(f"{'trunc' if _bits(own) > _bits(whole) else 'zext'} {own} {value} to {whole}")
        elif operand == "joined":  # the only array in the memory that a block shares
            return "0"
        elif "_param_" in operand:
            return self.new(f"ptrtoint ptr %{operand} to i64")
        elif operand.startswith("0f"):
            value, whole = str(int(operand[2:], 16)), "i32"
        elif operand.startswith("0d"):
            value, whole = str(int(operand[2:], 16)), "i64"
        else:
            value = str(int(operand, 0)) if operand not in ("true", "false") else operand
        return self.new(f"bitcast {whole} {value} to {kind}") if kind in _WIDTHS else value

    def write(self, register: str, value: str, kind: str) -> None:
        own = _TYPES[re.sub(r"\d+$", "", register[1:])]
        if kind in _WIDTHS:
            value, kind = self.new(f"bitcast {kind} {value} to i{_bits(kind)}"), f"i{_bits(kind)}"
        if _bits(own) != _bits(kind):
            value = self.new(f"{'trunc' if _bits(kind) > _bits(own) else 'zext'} {kind} {value} to {own}")
        self.lines.append(f"store {own} {value}, ptr %R{register[1:]}")

    def call(self, name: str, kind: str, *values: str) -> str:
        text = f"{kind} @llvm.{name}.{'f' if kind in _WIDTHS else 'i'}{_bits(kind)}"
        self.declared.add(f"declare {text}({', '.join([kind] * len(values))})")
        return self.new(f"call {text}({', '.join(f'{kind} {value}' for value in values)})")

    def address(self, operand: str) -> str:
        base, _, more = operand.strip("[]").partition("+")
        found = self.read(base, "i64")
        return self.new(f"add i64 {found}, {int(more)}") if more else found

    def place(self, space: str, at: str, kind: str) -> str:
        """The host's pointer to an element."""
        if space == "param":
            return self.new(f"inttoptr i64 {at} to ptr")
        assert space in ("global", "shared"), space
        return self.new(f"call ptr @warp_{'at' if space == 'global' else space}(i64 {at}, i64 {_bits(kind) // 8})")

    def instruction(self, op: str, given: list[str]) -> None:
        words = op.split(".")
        name, last = words[0], words[-1]
        kind = _FLOATS.get(last) or ("i1" if last == "pred" else f"i{last[1:]}" if last[1:].isdigit() else "")
        if name == "ld":
            at = self.address(given[1])
            place = self.place(words[1], at, kind)
            self.write(given[0], self.new(f"load {kind}, ptr {place}, align 1"), kind)
        elif name == "st":
            value = self.read(given[1], kind)
            place = self.place(words[1], self.address(given[0]), kind)
            self.lines.append(f"store {kind} {value}, ptr {place}, align 1")
        elif name in ("mov", "cvta"):
            self.write(given[0], self.read(given[1], kind), kind)
        elif name == "setp":
            test = words[1]
            how = f"fcmp {_COMPARED[test]}" if kind in _WIDTHS else f"icmp {self._order(test, last)}"
            a, b = self.read(given[1], kind), self.read(given[2], kind)
            self.write(given[0], self.new(f"{how} {kind} {a}, {b}"), "i1")
        elif name == "selp":
            a, b, chosen = self.read(given[1], kind), self.read(given[2], kind), self.read(given[3], "i1")
            self.write(given[0], self.new(f"select i1 {chosen}, {kind} {a}, {kind} {b}"), kind)
        elif name == "shfl":
            value = self.new(f"call i32 @warp_shuffle(i32 {self.read(given[1], 'i32')}, i32 {given[2]})")
            self.write(given[0], value, "i32")
        elif name == "high":
            self.write(given[0], self.new(f"lshr i32 {self.read(given[1], 'i32')}, 16"), "i32")
        elif name == "bar":
            self.lines.append(f"call void @warp_{'sync' if words[1] == 'warp' else 'barrier'}()")
        elif name == "cvt":
            self._convert(words, given)
        else:
            self._compute(words, given, kind)

    @staticmethod
    def _order(test: str, last: str) -> str:
        if test in ("eq", "ne"):
            return test
        return _UNSIGNED.get(test) or ("s" if last[0] == "s" else "u") + test

    def _convert(self, words: list[str], given: list[str]) -> None:
        to, of = words[-2], words[-1]
        new, old = (_FLOATS.get(each, f"i{each[1:]}") for each in (to, of))
        value = self.read(given[1], old)
        if old in _WIDTHS and new in _WIDTHS:
            if old == new:
                made = self.call(_ROUNDED[words[1]], old, value)
            else:
                assert "rn" in words or _bits(new) > _bits(old), words
                made = self.new(f"{'fpext' if _bits(new) > _bits(old) else 'fptrunc'} {old} {value} to {new}")
        elif old in _WIDTHS:
            assert words[1] == "rzi", words
            text = f"{new} @llvm.fpto{'s' if to[0] == 's' else 'u'}i.sat.{new}.f{_bits(old)}"
            self.declared.add(f"declare {text}({old})")
            made = self.new(f"call {text}({old} {value})")
        elif new in _WIDTHS:
            assert words[1] == "rn", words
            made = self.new(f"{'s' if of[0] == 's' else 'u'}itofp {old} {value} to {new}")
        elif _bits(old) == _bits(new):
            made = value
        else:
            how = "trunc" if _bits(old) > _bits(new) else "sext" if of[0] == "s" else "zext"
            made = self.new(f"{how} {old} {value} to {new}")
        if new not in _WIDTHS and to[0] == "s" and _bits(new) < _bits(_TYPES[re.sub(r"\d+$", "", given[0][1:])]):
            wide = _TYPES[re.sub(r"\d+$", "", given[0][1:])]
            made, new = self.new(f"sext {new} {made} to {wide}"), wide
        self.write(given[0], made, new)

    def _compute(self, words: list[str], given: list[str], kind: str) -> None:
        name, last, signed = words[0], words[-1], words[-1][0] == "s"
        wide = kind
        values = [self.read(each, "i32" if name in ("shl", "shr") and i else kind) for i, each in enumerate(given[1:])]
        if name in ("shl", "shr"):
            if kind != "i32":
                how = "zext" if _bits(kind) > 32 else "trunc"
                values[1] = self.new(f"{how} i32 {values[1]} to {kind}")
            how = "shl" if name == "shl" else "ashr" if signed else "lshr"
            made = self.new(f"{how} {kind} {values[0]}, {values[1]}")
        elif name in ("mul", "mad") and "wide" in words:
            wide = f"i{2 * _bits(kind)}"
            a, b = (self.new(f"{'sext' if signed else 'zext'} {kind} {value} to {wide}") for value in values[:2])
            made = self.new(f"mul {wide} {a}, {b}")
            if name == "mad":
                made = self.new(f"add {wide} {made}, {self.read(given[3], wide)}")
        elif name == "mul" and "hi" in words:
            double = f"i{2 * _bits(kind)}"
            a, b = (self.new(f"{'sext' if signed else 'zext'} {kind} {value} to {double}") for value in values)
            high = self.new(f"lshr {double} {self.new(f'mul {double} {a}, {b}')}, {_bits(kind)}")
            made = self.new(f"trunc {double} {high} to {kind}")
        elif name == "mad":
            made = self.new(f"add {kind} {self.new(f'mul {kind} {values[0]}, {values[1]}')}, {values[2]}")
        elif kind in _WIDTHS and name in ("add", "sub", "mul", "div"):
            assert name in ("add", "sub", "mul") or "rn" in words, words
            made = self.new(f"f{name} {kind} {values[0]}, {values[1]}")
        elif kind in _WIDTHS:
            made = self._float(name, kind, values)
        elif name in ("div", "rem"):
            made = self.new(f"{'s' if signed else 'u'}{name} {kind} {values[0]}, {values[1]}")
        elif name in ("min", "max"):
            made = self.call(f"{'s' if signed else 'u'}{name}", kind, *values)
        elif name == "neg":
            made = self.new(f"sub {kind} 0, {values[0]}")
        elif name == "abs":
            below = self.new(f"icmp slt {kind} {values[0]}, 0")
            made = self.new(f"select i1 {below}, {kind} {self.new(f'sub {kind} 0, {values[0]}')}, {kind} {values[0]}")
        elif name == "bfe":
            assert not signed, words
            shifted = self.new(f"lshr {kind} {values[0]}, {values[1]}")
            made = self.new(f"and {kind} {shifted}, {(1 << int(values[2])) - 1}")
        elif name == "not":
            made = self.new(f"xor {kind} {values[0]}, -1")
        elif name in _BINARY:
            made = self.new(f"{_BINARY[name]} {kind} {values[0]}, {values[1]}")
        else:
            raise NotImplementedError(".".join(words) + f" of {last}")
        self.write(given[0], made, wide)

    def _float(self, name: str, kind: str, values: list[str]) -> str:
        if name == "rcp":
            return self.new(f"fdiv {kind} {'1.0' if kind != 'half' else '0xH3C00'}, {values[0]}")
        if name == "neg":
            return self.new(f"fneg {kind} {values[0]}")
        if name == "copysign":  # the sign of the first
            return self.call("copysign", kind, values[1], values[0])
        if name == "fma":
            return self.call("fma", kind, *values)
        if name in ("min", "max"):
            return self.call(f"{name}num", kind, *values)
        if name in _UNARY:
            return self.call(_UNARY[name], kind, values[0])
        raise NotImplementedError(f"{name} of {kind}")


def translated(ptx: str) -> str:
    """LLVM text with a function ``twin`` for warp.c's ``warp_launch``."""
    made = _Translation()
    body = ptx[ptx.index("{") + 1 : ptx.rindex("}")]
    parameters = re.findall(r"\w+_param_\d+", ptx[: ptx.index("{")])
    for kind, count in re.findall(r"\.reg \.\w+\s+%(\w+)<(\d+)>;", body):
        made.lines += [f"%R{kind}{i} = alloca {_TYPES[kind]}" for i in range(int(count))]
    halves = r"\{ \.reg \.b16 tmp; mov\.b32 \{(\w+|%\w+), (\w+|%\w+)\}, (%r\d+); \}"  # of a word, one of them taken
    body = re.sub(halves, lambda m: f"high {m[2]}, {m[3]};" if m[1] == "tmp" else f"cvt.u16.u32 {m[1]}, {m[3]};", body)
    body = re.sub(r"\.(?:reg|shared) [^;]*;|//[^\n]*|\.pragma[^;]*;", "", body)
    fall = 0
    for line in re.findall(r"\$\w+:|[^;:{}]+;", body):
        text = line.strip().rstrip(";").strip()
        if text.endswith(":"):
            made.lines += [f"br label %{text[1:-1]}", f"{text[1:-1]}:"]
            continue
        guard, op, rest = re.fullmatch(r"(?:@(!?%p\d+)\s+)?(\S+)\s*(.*)", text, re.DOTALL).groups()
        given = [each.strip() for each in rest.split(",")] if rest else []
        if op.startswith("bra"):
            fall += 1
            if guard:
                test = made.read(guard.lstrip("!"), "i1")
                ways = (given[0][1:], f"fall{fall}")
                yes, no = ways[::-1] if guard.startswith("!") else ways
                made.lines.append(f"br i1 {test}, label %{yes}, label %{no}")
            else:
                made.lines.append(f"br label %{given[0][1:]}")
            made.lines.append(f"fall{fall}:")
        elif op == "ret":
            fall += 1
            made.lines += ["ret void", f"fall{fall}:"]
        else:
            assert guard is None, text
            made.instruction(op, given)
    made.lines.append("unreachable")
    stated = ", ".join(f"ptr %{name}" for name in parameters)
    text = f"define void @twin({stated}, i32 %tid, i32 %ctaid, i32 %ntid) {{\n" + "\n".join(made.lines) + "\n}\n"
    return _HEAD + "\n".join(sorted(made.declared)) + "\n" + text


_ENGINES: list[Any] = []  # as long as the process: their code is called by address


def compiled(ptx: str, addresses: dict[str, int]) -> int:
    """The address of a kernel's function on the host; `addresses` are those of warp.c's functions."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for name, address in addresses.items():
        llvm.add_symbol(name, address)
    module = llvm.parse_assembly(translated(ptx))
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=1)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    _ENGINES.append(engine)
    return int(engine.get_function_address("twin"))
