"""Small training steps in standard ONNX operators, and the generators that write them."""
