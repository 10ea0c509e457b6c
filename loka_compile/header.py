"""What a table's rows (and the plan made from them) hold for: device, versions, model. No torch import."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loka_compile import jsonio
from loka_compile.errors import CorruptFileError, StaleTableError


@dataclass(frozen=True)
class Header:
    """What the rows hold for. Empty strings mean "not known" or "none" and are compared like any other value."""

    #: Cost table used for the speeds, "" when none was.
    target: str = ""
    #: Device on which the errors (and measured speeds) were taken, such as "cpu" or "NVIDIA H200".
    device: str = ""
    driver: str = ""
    torch: str = ""
    triton: str = ""
    #: Versions of kernel libraries by name.
    libraries: Mapping[str, str] = field(default_factory=dict)
    #: Shape of the weight, (N, K), of every site of the model.
    fingerprint: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    #: Sampled rows left out because they held NaN or Inf, of the sites where there were any.
    dropped_rows: Mapping[str, int] = field(default_factory=dict)
    #: Tensors that are one and the same in the graph, under their own name -> under the first one's: ``"b#0 input"`` ->
    #: ``"a#0 input"`` where layers a and b read the same activation.
    same: Mapping[str, str] = field(default_factory=dict)
    #: When the table was made (ISO 8601); says nothing about content and is left out of the digest.
    created: str = ""

    def differences(
        self,
        *,
        fingerprint: Mapping[str, Sequence[int]] | None = None,
        libraries: Mapping[str, str] | None = None,
        exact: bool = False,
        **expected: str | None,
    ) -> list[str]:
        """What differs from the expectation, one readable line each; see :meth:`Table.check` for the arguments."""
        found = []
        for name, want in expected.items():
            have = getattr(self, name)
            if want is not None and have != want:
                found.append(f"{name} is {have or 'none'!r}, expected {want or 'none'!r}")
        for name, version in (libraries or {}).items():
            if self.libraries.get(name) != version:
                found.append(f"library {name} is {self.libraries.get(name, 'absent')!r}, expected {version!r}")
        if fingerprint is not None:
            for site, shape in fingerprint.items():
                have_shape = self.fingerprint.get(site)
                if have_shape is None:
                    found.append(f"site {site!r} [N, K] = {list(shape)} is not in it")
                elif tuple(have_shape) != tuple(shape):
                    found.append(f"site {site!r} has [N, K] = {list(have_shape)}, the model {list(shape)}")
            if exact:
                found += [f"site {site!r} is not in the model" for site in self.fingerprint if site not in fingerprint]
        return found

    def check(self, what: str, **expected: Any) -> None:
        """Raise StaleTableError naming every difference; ``what`` names the table or plan in the text."""
        found = self.differences(**expected)
        if found:
            shown = found[:8] + ([f"and {len(found) - 8} more"] if len(found) > 8 else [])
            raise StaleTableError(
                f"{what} does not fit: {'; '.join(shown)}. Measure again for this model, device and versions, "
                "or give the file that belongs to them."
            )

    def to_json(self, *, timestamps: bool = True) -> dict[str, Any]:
        """A JSON-ready dict, sites and libraries in sorted order."""
        out: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        out["libraries"] = dict(sorted(self.libraries.items()))
        out["dropped_rows"] = dict(sorted(self.dropped_rows.items()))
        out["same"] = dict(sorted(self.same.items()))
        out["fingerprint"] = {site: list(shape) for site, shape in sorted(self.fingerprint.items())}
        if not timestamps:
            del out["created"]
        return out

    def dumps(self) -> str:
        """Indented JSON text with one site per line."""
        text = jsonio.dumps(self.to_json(), indent=2)
        # Line breaks are escaped inside strings, so only lists are matched.
        return re.sub(r"\[\n\s*(\d+),\n\s*(\d+)\n\s*\]", r"[\1, \2]", text).replace("\n", "\n ")

    @classmethod
    def from_json(cls, value: Any, where: str) -> Header:
        """The header from its JSON form; CorruptFileError names ``where`` and the key."""
        entry = jsonio.as_object(value, where)
        libraries = {
            name: jsonio.as_str(version, f"{where}, library {name!r}")
            for name, version in jsonio.as_object(entry.get("libraries", {}), f"{where}, key 'libraries'").items()
        }
        dropped = {
            site: jsonio.as_int(count, f"{where}, dropped rows of site {site!r}")
            for site, count in jsonio.as_object(entry.get("dropped_rows", {}), f"{where}, key 'dropped_rows'").items()
        }
        same = {
            name: jsonio.as_str(first, f"{where}, tensor {name!r}")
            for name, first in jsonio.as_object(entry.get("same", {}), f"{where}, key 'same'").items()
        }
        fingerprint = {}
        for site, shape in jsonio.as_object(entry.get("fingerprint", {}), f"{where}, key 'fingerprint'").items():
            place = f"{where}, fingerprint of site {site!r}"
            sizes = [jsonio.as_int(size, place) for size in jsonio.as_list(shape, place)]
            if len(sizes) != 2:
                raise CorruptFileError(f"{place} must be [N, K], not {shape!r}")
            fingerprint[site] = (sizes[0], sizes[1])
        return jsonio.record(
            cls, entry, where, libraries=libraries, fingerprint=fingerprint, dropped_rows=dropped, same=same
        )
