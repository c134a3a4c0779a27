"""The command ``pipesync plan``."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lightning_pipesync.lab.netlab.command import LinkOptions
from lightning_pipesync.lab.plan.model import PlanSettings
from lightning_pipesync.lab.predictions.cluster import Cluster
from lightning_pipesync.lab.predictions.work import Work


@dataclass(frozen=True)
class Plan(PlanSettings, LinkOptions):
    """Measures hosts, network and model, predicts a step with each method, runs the best, and says what to type.

    Run it under the launcher of your job, such as torchrun, with the same hosts. Without a launcher it plans for hosts
    of an emulated network, or for processes on this machine. With --from it measures nothing.

    Attributes:
        hosts: Number of hosts, one rank each; 2 if not given. Under a launcher, the launcher's. With --from: of a
            larger or smaller cluster.
        rate: Of each host's link in an emulated network, e.g. 1gbit. With --from: of the links of another cluster.
        latency: With --from: of the links of another cluster, from a host to another one, one way, e.g. 40ms; half of a
            ping.
        from_file: plan.json of an earlier plan, instead of measuring. Written as --from, too.
        output: Folder for plan.json, plan.md and plan.png; outputs/plan if not given, with --from none.
        json: Print plan.json instead of the tables.
    """

    hosts: int | None = None
    rate: str | None = None
    latency: str | None = None
    from_file: Path | None = None
    output: Path | None = None
    json: bool = False

    def run(self) -> None:
        """Plans, writes the plan, and prints it."""
        # Imported here because it is slow to import.
        from lightning_pipesync.lab.plan.report import as_markdown, write_plan

        output = self.output
        if self.from_file is not None:
            found: tuple[Work, Cluster, dict[str, Any]] | None = self._read(self.from_file)
        else:
            output = output or Path("outputs/plan")
            found = self._measured(output)
        if found is None:
            return  # another rank has it
        text = as_markdown(*found) if output is None else write_plan(output, *found)
        print(json.dumps({"kind": "plan", "results": [found[2]]}) if self.json else text)

    def _measured(self, output: Path) -> tuple[Work, Cluster, dict[str, Any]] | None:
        """Measures, and returns the plan; None on the ranks of a launcher other than the first."""
        from lightning_pipesync.lab.bench import benchmark
        from lightning_pipesync.lab.bench.tables import check_folder
        from lightning_pipesync.lab.plan.measure import measure_plan
        from lightning_pipesync.lab.plan.saved import of_result
        from lightning_pipesync.lab.plan.trials import PROVEN

        if self.ranks_per_replica > 1 and not benchmark.launched():
            raise ValueError(
                f"ranks_per_replica={self.ranks_per_replica} needs a launcher that starts as many ranks on each host: "
                "torchrun --nnodes 2 --nproc-per-node 2 ... -m lightning_pipesync plan, on emulated hosts within "
                "pipesync netlab, see docs/plan.md."
            )
        if self.latency is not None:
            raise ValueError(
                f"latency={self.latency!r} is for other links than were measured, with --from. In an emulated network, "
                "it is the delay."
            )
        settings = PlanSettings(**{field.name: getattr(self, field.name) for field in fields(PlanSettings)})
        if not benchmark.launched():  # ranks of a launcher build it first, and tell each other
            settings.check_model()
        num_measurements = 2 + (self.rounds + 1) * (2 + 2 * PROVEN) * (self.rounds > 0)
        counts = [self.hosts or 2]
        benchmark.check_hosts(counts, self)
        if benchmark.on_first_rank():
            check_folder(output)  # an error now, not after all measurements
        results = benchmark.run_on(measure_plan, settings, counts, self, num_measurements)
        if not results:
            return None
        if error := results[0].get("error"):
            raise ValueError(f"model={self.model!r} cannot be measured, so that there is no plan. {error}")
        return of_result(results[0])

    def _read(self, earlier: Path) -> tuple[Work, Cluster, dict[str, Any]]:
        """Returns an earlier plan, for other hosts and links if they are given."""
        from lightning_pipesync.lab.plan.saved import Elsewhere, read_plan

        if listed := self.listed_beside_rate():
            raise ValueError(
                f"{listed}: with --from nothing is measured in an emulated network. Leave it out; rate and latency "
                "are those of other links."
            )
        given = {field.name: getattr(self, field.name) for field in fields(PlanSettings)}
        if own := [f"{name}={value!r}" for name, value in given.items() if value != getattr(PlanSettings, name)]:
            raise ValueError(f"{', '.join(own)}: with --from nothing is measured. Leave it out: {earlier} has its own.")
        if self.output is not None and (self.output / "plan.json").resolve() == earlier.resolve():
            raise ValueError(
                f"output={str(self.output)!r} has the plan.json that is read, and what was measured: choose another."
            )
        return read_plan(earlier, Elsewhere(self.hosts, self.rate, self.latency))
