"""The state of resources at one moment: columns, differences, JSON, PyTorch's form."""
