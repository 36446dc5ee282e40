"""Fused kernels: adjacent elementwise nodes of a step, computed by one kernel each.

A file that is written holds standard ops. When a session opens it, `groups` finds runs of elementwise nodes in their
order of execution that one kernel can compute, `ir` writes that kernel as LLVM text, `kernels` compiles it (or finds it
on the disk), and ``shim.c``, a small custom-op library, makes stock ONNX Runtime run it. Values that are made and read
within one group have no buffer. Kernels give ONNX Runtime's results to the bit.

========= ===================================================================================
`code`    LLVM instructions; how elements are loaded and stored
`ops`     the table of operators: types, and the instructions of each
`spaces`  the loops over which a group's values are read: axes, and strides over them
`groups`  which nodes become one: a pure function of the order, the shapes and the lifetimes
`ir`      a group as LLVM text
`kernels` text as machine code that can lie anywhere, kept on the disk
`build`   ``shim.c`` compiled
`library` the custom-op library: found or built, and given the kernels
`nodes`   steps with their groups replaced by nodes that name kernels
========= ===================================================================================
"""
