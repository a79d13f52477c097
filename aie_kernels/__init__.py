"""The NPU side: core kernel, design, instruction streams."""

import pkgutil

# In a source folder the compiled simulator comes from where the package is installed.
__path__ = pkgutil.extend_path(__path__, __name__)
