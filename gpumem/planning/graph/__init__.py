"""A model's graph: values and nodes, checked; read from ONNX files."""
