"""Kernels of our own: adjacent elementwise nodes of a step, computed by one kernel each, products and convolutions.

Written files contain standard ops. When a session opens one, `groups` finds groups of elementwise nodes in execution
order that one kernel can compute, `ir` writes that kernel as LLVM text, `kernels` compiles it (or finds it on the
disk), and ``shim.c``, a small custom-op library, makes stock ONNX Runtime run it. Values that are made and read within
one group have no buffer. These kernels give ONNX Runtime's results to the bit. `products` of large matrices call
OpenBLAS, and `convolutions` with their gradients oneDNN, where that is faster; their results are within rounding.

============== ==================================================================================
`code`         LLVM instructions; loads and stores of elements
`ops`          the table of operators: types, and the instructions of each
`spaces`       iteration spaces: the axes of a group's elements, and the strides of its values
`groups`       which nodes are fused: a pure function of the order, the shapes and the lifetimes
`ir`           a group as LLVM text
`blas`         the matrix product of numpy's OpenBLAS
`products`     matrix products as kernels that call it
`onednn`       convolutions by oneDNN: its formats, its primitives, its scratch memory
`convolutions` which nodes compute one
`libraries`    steps with products and convolutions replaced by nodes that call these libraries
`kernels`      LLVM text -> position-independent machine code, cached on the disk
`build`        compiles ``shim.c`` and ``convolution.c``
`library`      the custom-op library: finds or builds it, and passes it the kernels
`nodes`        steps with their groups replaced by nodes that name kernels
============== ==================================================================================
"""
