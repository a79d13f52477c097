"""The NPU side: core kernel, design, instruction streams."""
