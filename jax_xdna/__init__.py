"""Matrix products of JAX programs on AMD Ryzen AI NPUs, or on the emulated device.

`dot` and `dot_general` multiply on the device, `offload` sends the large dots of any function
there, and `explain` says which ones and why.
"""

import pkgutil as _pkgutil

import jax as _jax

# In a source folder `python -m models.finetune` imports this package from the folder, which has no
# compiled part: let it come from where the package is installed.
__path__ = _pkgutil.extend_path(__path__, __name__)

try:
    from . import _ffi
except ImportError as _error:
    raise ImportError(
        f"jax_xdna's compiled part, jax_xdna._ffi, cannot be loaded ({_error}); build and install "
        "the package for this Python with `pip install .` in its source folder"
    ) from _error

from ._devices import default_device, devices
from ._dot import dot, dot_general
from ._explain import explain
from ._offload import offload
from ._policy import Policy
from ._profile import profile

__version__ = "0.1.0"

__all__ = [
    "Policy",
    "__version__",
    "default_device",
    "devices",
    "dot",
    "dot_general",
    "explain",
    "offload",
    "profile",
]

# Only queued by JAX: importing this package starts no backend.
for _name, _handler in _ffi.registrations().items():
    _jax.ffi.register_ffi_target(_name, _handler, platform="cpu")
