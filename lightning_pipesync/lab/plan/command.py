"""``pipesync plan``."""

from __future__ import annotations

from json import dumps
from pathlib import Path


def plan(
    hosts: int | None = None,
    rate: str | None = None,
    racks: int = 1,
    uplink: str | None = None,
    model: str = "emulated-resnet50",
    scale: float = 0.1,
    compute_ms: float = 200.0,
    steps: int = 5,
    rounds: int = 3,
    device: str = "cpu",
    from_file: Path | None = None,
    output: Path | None = None,
    json: bool = False,
) -> None:
    """Measures hosts, network and model, predicts a step with each method, runs the best, and says what to type.

    Run it under the launcher of your job, such as torchrun, with the same hosts. Without a launcher it plans for hosts
    of an emulated network, or for processes on this machine. With --from it measures nothing.

    Args:
        hosts: Number of hosts, one rank each; 2 if not given. Under a launcher, its own. With --from: of a larger or
            smaller cluster.
        rate: Of each host's link in an emulated network, e.g. 1gbit. With --from: of the links of another cluster.
        racks: Number of racks in the emulated network.
        uplink: Rate of each rack's link to the others, e.g. 200mbit.
        model: Yours, as MODULE:FUNCTION, which returns (module, batch, loss), where loss(module, batch) is a scalar; or
            transformer, cnn, resnet50 or bert-base; or emulated-alexnet, emulated-resnet50, emulated-densenet201,
            emulated-inceptionv4, emulated-bert-base or emulated-bert-large, whose layers sleep.
        scale: Number of values in each tensor of an emulated model over the true number.
        compute_ms: Forward and backward pass of an emulated model, in milliseconds.
        steps: Least number of steps of one measurement of a method.
        rounds: Number of measurements of each method that is run, in turns; 0: only predict.
        device: cpu; or cuda, a GPU for each rank, over NCCL, with a model of yours.
        from_file: plan.json of an earlier plan, instead of measuring. Written as --from, too.
        output: Folder for plan.json, plan.md and plan.png; outputs/plan if not given, with --from none. If it has an
            earlier plan, what has changed since is said.
        json: Print plan.json instead of the tables.
    """
    from lightning_pipesync.lab.bench import benchmark
    from lightning_pipesync.lab.bench.tables import write_results
    from lightning_pipesync.lab.plan.measure import measure_plan
    from lightning_pipesync.lab.plan.model import PlanSettings
    from lightning_pipesync.lab.plan.picture import draw
    from lightning_pipesync.lab.plan.report import as_markdown
    from lightning_pipesync.lab.plan.saved import changes_since, of_result, read_plan
    from lightning_pipesync.lab.plan.trials import PROVEN

    if from_file is not None:
        work, cluster, result = read_plan(from_file, hosts, rate)
    else:
        settings = PlanSettings(model, scale, compute_ms, steps, rounds, device)
        num_measurements = 2 + (rounds + 1) * (2 + 2 * PROVEN) * (rounds > 0)
        emulated = benchmark.make_hosts([hosts or 2], rate, racks, uplink)
        results = benchmark.run_on(measure_plan, settings, emulated, num_measurements)
        if not results:
            return  # another rank has them
        if "error" in results[0]:
            raise ValueError(f"model={model!r} cannot be measured, so that there is no plan. {results[0]['error']}")
        output = output or Path("outputs/plan")
        work, cluster, result = of_result(results[0])
        result["changes"] = changes_since(output / "plan.json", result)
    text, saved = as_markdown(work, cluster, result), {"kind": "plan", "results": [result]}
    if output is not None:
        write_results(output, "plan", saved, text)
        draw(work, cluster, result, output / "plan.png")
    if json:
        print(dumps(saved))
    else:
        print(text + (f"\nIn {output}: plan.json, plan.md, plan.png." if output else ""))
