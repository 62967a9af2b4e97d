"""What tests on GPUs measure: the rows of the table in docs/reference/gpu.md."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Figures:
    """Measured figures, in the order in which they are added."""

    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, label: str, value: float, unit: str) -> None:
        """Add a row: the label says what was measured, and the value has this unit."""
        self.rows.append({"label": label, "value": value, "unit": unit})

    def write(self, path: Path) -> None:
        """Append the rows to a file, a JSON object a line."""
        with path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in self.rows)
