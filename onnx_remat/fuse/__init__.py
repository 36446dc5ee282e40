"""Kernels of our own: groups of elementwise nodes and nodes along rows, matrix products, convolutions.

Written files contain standard ops. When a session opens one, or its memory is predicted, `groups` finds groups of nodes
in execution order that one kernel can compute, and `ir` writes that kernel as LLVM text. When it is opened,
`machine_code` also compiles the text (or finds the code on the disk), and ``shim.c``, a small custom-op library, makes
stock ONNX Runtime run it. Values that are made and read within one group
have no buffer. Arithmetic gives ONNX Runtime's results to the bit, `functions` and `rows` within rounding. `products`
of large matrices call OpenBLAS, and `convolutions` with their gradients oneDNN, where that is faster; their results are
within rounding, too.

============== ==================================================================================
`code`         LLVM instructions; loads and stores of elements
`functions`    exp, log, tanh, erf and the logistic function as LLVM text
`rows`         operators along rows: which nodes they are, sums and maxima as LLVM text
`ops`          the table of elementwise operators: types, and the instructions of each
`ordered`      a step in execution order: its nodes, the values in its slab, who makes and reads them
`members`      which nodes can be in a group, and the elements that each computes
`spaces`       iteration spaces: the axes of a group's elements, and the strides of its values
`moves`        nodes that only move elements, such as Transpose, as index arithmetic
`live`         the bytes that are live at each place while nodes move
`groups`       which nodes are fused: a pure function of the order, the shapes and the lifetimes
`recompute`    values that kernels compute again instead of reading them
`kernel`       what a kernel is: its text, its description for ``shim.c``, the nodes it can replace, its node
`loops`        loops over elements and rows as LLVM text
`ir`           a group as LLVM text, for a CPU
`cuda`         a group as a kernel of a CUDA device
`driver`       the CUDA driver: loads such kernels
`blas`         the matrix product of numpy's OpenBLAS
`products`     matrix products as kernels that call it
`onednn`       convolutions by oneDNN: its formats, its primitives, its scratch memory
`convolution_forms`, `layouts`: which nodes compute a convolution or a gradient of one; the formats they can be in
`convolutions` kernels of those, by oneDNN
`depthwise`    weight gradients of depthwise convolutions
`pools`        MaxPool with indices, and its gradient
`scatters`     sums of rows into a matrix
`pads`         Pads on a device
`machine_code` LLVM text -> position-independent machine code, cached on the disk
`build`        compiles ``shim.c`` and ``convolution.c``
`shim`         the custom-op library: finds or builds it, and passes it the kernels
`replacements` single nodes and small patterns replaced by nodes with such kernels: `products` to `pads`
`nodes`        steps with their groups replaced by nodes that name kernels
`segments`     kernels of equal code as one kernel of a device
`joins`        which kernels are joined to such a one
============== ==================================================================================
"""
