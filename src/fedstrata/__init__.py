"""Federated fine-tuning, stratum by stratum.

```python
import fedstrata as fs

result = fs.run("experiment.toml", seed=1)
result.summary["metrics"]["test"]
fs.load("runs/quickstart-1a2b3c4d").rounds
```
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedstrata.api import RunResult, load, run

__version__ = "0.1.0.dev0"
__all__ = ["RunResult", "__version__", "load", "run"]


def __getattr__(name: str) -> Any:
    if name in ("RunResult", "load", "run"):
        from fedstrata import api

        return getattr(api, name)
    raise AttributeError(f"module 'fedstrata' has no attribute {name!r}")
