"""Curves as a DataFrame. The only user of pandas, which is an extra."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from slurmtrain.errors import NotAvailable
from slurmtrain.model.metrics.curves import Curve, Points

if TYPE_CHECKING:
    import pandas as pd


def frame_of(curves: Mapping[str, Curve]) -> pd.DataFrame:
    """A row for each point of these ``curves``: ``metric``, ``step``, ``attempt``, ``time``, ``value``, ``superseded``.

    Raises NotAvailable without pandas.
    """
    try:
        import numpy as np
        import pandas as pd
    except ImportError as error:
        raise NotAvailable(
            f"a DataFrame needs pandas ({error}): pip install 'slurmtrain[pandas]'; curves() has the same points "
            "without it"
        ) from error
    columns: list[tuple[str, Points, bool]] = []
    for name, curve in curves.items():
        columns += [(name, curve.kept, False), (name, curve.superseded, True)]
    lengths = [len(points) for _, points, _ in columns]

    def joined(field: str, kind: str) -> np.ndarray:
        return np.concatenate([np.empty(0, kind), *(np.asarray(getattr(points, field)) for _, points, _ in columns)])

    return pd.DataFrame(
        {
            "metric": np.repeat(np.array([name for name, _, _ in columns], object), lengths),
            "step": joined("steps", "int64"),
            "attempt": joined("attempts", "int64"),
            "time": pd.to_datetime(joined("times", "float64"), unit="s", utc=True),
            "value": joined("values", "float64"),
            "superseded": np.repeat(np.array([superseded for _, _, superseded in columns], bool), lengths),
        }
    )
