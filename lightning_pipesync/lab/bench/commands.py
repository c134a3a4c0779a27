"""``pipesync bench collectives``, ``step``, ``stages``, ``timeline``, ``converge`` and ``pipeline``."""

from __future__ import annotations

from pathlib import Path


def collectives(
    hosts: list[int] = [2],  # noqa: B006 - never changed; shown in the help
    rate: str | None = None,
    racks: int = 1,
    uplink: str | None = None,
    sizes_mib: list[float] = [0.00390625, 0.0625, 0.25, 1, 4, 16],  # noqa: B006
    codecs: list[str] = ["bf16", "int8"],  # noqa: B006
    rounds: int = 7,
    output: Path = Path("outputs/bench"),
) -> None:
    """Times all-reduce and its two halves, compared with the backend's own, parameter servers and the limit.

    Args:
        hosts: Numbers of hosts, one rank each. Not used if a launcher has started this process.
        rate: Of each host's link in an emulated network, e.g. 1gbit. Without it the ranks talk over loopback.
        racks: Number of racks in the emulated network.
        uplink: Rate of each rack's link to the others, e.g. 200mbit.
        sizes_mib: Sizes of the whole buffer, in MiB of fp32.
        codecs: Codecs of this package's all-reduce, in addition to none.
        rounds: Number of measurements of each operation, in turns.
        output: Folder for collectives.json, collectives.md and collectives.png.
    """
    from lightning_pipesync.lab.bench import collectives_report, sweep
    from lightning_pipesync.lab.bench.collectives import CollectivesSettings, measure_collectives

    settings = CollectivesSettings(tuple(sizes_mib), tuple(codecs), rounds)
    results = sweep.run(measure_collectives, settings, sweep.make_hosts(hosts, rate, racks, uplink), len(sizes_mib))
    if results:
        sweep.finish("collectives", results, output, collectives_report.as_markdown(results))
        collectives_report.draw(results, output / "collectives.png")


def step(
    hosts: list[int] = [2],  # noqa: B006
    rate: str | None = None,
    racks: int = 1,
    uplink: str | None = None,
    model: str = "emulated-resnet50",
    scale: float = 0.1,
    methods: list[str] = ["ddp", "fsdp2", "zero", "dear", "selsync"],  # noqa: B006
    ratio: list[float] | None = None,
    bucket_mb: list[float] = [0.5, 2, 25],  # noqa: B006
    steps: int = 3,
    rounds: int = 5,
    output: Path = Path("outputs/bench"),
) -> None:
    """Times a training step by method, compared with DDP, FSDP2, ZeRO and the limits of the papers.

    Args:
        hosts: Numbers of hosts, one rank each. Not used if a launcher has started this process.
        rate: Of each host's link in an emulated network, e.g. 1gbit. Without it the ranks talk over loopback.
        racks: Number of racks in the emulated network.
        uplink: Rate of each rack's link to the others, e.g. 200mbit.
        model: transformer, cnn, resnet50 or bert-base; or emulated-alexnet, emulated-resnet50, emulated-densenet201,
            emulated-inceptionv4, emulated-bert-base or emulated-bert-large, whose layers sleep.
        scale: Number of values in each tensor of an emulated model over the true number.
        methods: What is compared: ddp, fsdp2, zero; serial, wfbp, mg-wfbp, horovod, horovod-bo, byte-scheduler and ps,
            the papers' baselines; dear-rs and dear-ag, half of DeAR; and dear, local_sgd, parameter_server, pipe_sgd
            and selsync, each with settings if need be: NAME:SETTING=VALUE,SETTING=VALUE, e.g. dear:overlap=forward,
            dear:edge_mb=0.5, dear:fusion=bo, which searches for a bucket size first, in some 100 steps,
            selsync:overlap=forward or pipe_sgd:compression=int8.
        ratio: Communication time over computation time of an emulated model; 1 if not given.
        bucket_mb: Bucket sizes of DDP, DeAR without a fusion of its own and SelSync under forward, and ByteScheduler's
            pieces, in MiB; DDP's best one is the baseline.
        steps: Steps of one measurement; of local SGD whole periods.
        rounds: Number of measurements of each candidate, in turns.
        output: Folder for step.json, step.md and the pictures.
    """
    from lightning_pipesync.lab.bench import step_pictures, step_report, sweep
    from lightning_pipesync.lab.bench.candidates import makers
    from lightning_pipesync.lab.bench.step import StepSettings, measure_step

    if "ddp" not in methods:
        raise ValueError(f"methods={methods!r}: ddp has to be among them, which all others are compared to.")
    emulated = model.startswith("emulated-")
    if not emulated and ratio is not None:
        raise ValueError(f"ratio={ratio!r} is a setting of emulated models: {model} takes its own time.")
    ratios = tuple(ratio or [1.0]) if emulated else ()
    settings = StepSettings(model, scale, tuple(methods), ratios, tuple(bucket_mb), steps, rounds)
    num_measurements = max(1, len(ratios)) * (rounds + 1) * (1 + len(makers(methods, bucket_mb)))
    results = sweep.run(measure_step, settings, sweep.make_hosts(hosts, rate, racks, uplink), num_measurements)
    if results:
        sweep.finish("step", results, output, step_report.as_markdown(results))
        step_pictures.draw(results, output)


def stages(
    hosts: list[int] = [2],  # noqa: B006
    rate: str | None = None,
    racks: int = 1,
    uplink: str | None = None,
    methods: list[str] = ["ea_pipe", "pipedream", "gpipe", "1f1b"],  # noqa: B006
    stage_ms: list[float] = [100],  # noqa: B006
    activation_mib: float = 0.25,
    steps: int = 20,
    rounds: int = 3,
    output: Path = Path("outputs/bench"),
) -> None:
    """Times the mini-batches of a pipeline in the steady state, compared with GPipe, 1F1B and stages that never wait.

    Args:
        hosts: Numbers of hosts, one stage each. Not used if a launcher has started this process.
        rate: Of each host's link in an emulated network, e.g. 1gbit. Without it the ranks talk over loopback.
        racks: Number of racks in the emulated network.
        uplink: Rate of each rack's link to the others, e.g. 200mbit.
        methods: What is compared: ea_pipe, pipedream, weight_stashing, naive, spectrain, gpipe or 1f1b, each with
            settings if need be: NAME:SETTING=VALUE,SETTING=VALUE, e.g. ea_pipe:replicas=5 or gpipe:micro_batches=16.
        stage_ms: Computation of a stage for each mini-batch, in milliseconds; a third of it is the forward pass.
        activation_mib: MiB of the activations of a mini-batch between two stages, and of their gradients.
        steps: Mini-batches of one measurement.
        rounds: Number of measurements of each candidate, in turns.
        output: Folder for stages.json, stages.md and stages.png, of the last number of hosts.
    """
    from lightning_pipesync.lab.bench import sweep
    from lightning_pipesync.lab.papers import stages_report
    from lightning_pipesync.lab.papers.stages import StagesSettings, measure_stages

    settings = StagesSettings(tuple(methods), tuple(stage_ms), activation_mib, steps, rounds)
    num_measurements = len(stage_ms) * rounds * len(methods)
    results = sweep.run(measure_stages, settings, sweep.make_hosts(hosts, rate, racks, uplink), num_measurements)
    if results:
        sweep.finish("stages", results, output, stages_report.as_markdown(results))
        stages_report.draw(results[-1]["runs"][0], output / "stages.png")


def timeline(
    hosts: int = 2,
    rate: str | None = None,
    racks: int = 1,
    uplink: str | None = None,
    model: str = "emulated-resnet50",
    scale: float = 0.1,
    methods: list[str] = ["ddp", "dear"],  # noqa: B006
    ratio: float = 1.0,
    bucket_mb: list[float] = [2],  # noqa: B006
    steps: int = 2,
    output: Path = Path("outputs/bench"),
) -> None:
    """Draws when training steps compute and when they communicate, by method.

    Args:
        hosts: Number of hosts, one rank each. Not used if a launcher has started this process.
        rate: Of each host's link in an emulated network, e.g. 1gbit. Without it the ranks talk over loopback.
        racks: Number of racks in the emulated network.
        uplink: Rate of each rack's link to the others, e.g. 200mbit.
        model: emulated-alexnet, emulated-resnet50, emulated-densenet201, emulated-inceptionv4, emulated-bert-base or
            emulated-bert-large, whose layers sleep.
        scale: Number of values in each tensor over the true number.
        methods: What is drawn: ddp, dear, local_sgd, pipe_sgd, selsync, with settings as in `bench step`.
        ratio: Communication time over computation time.
        bucket_mb: Bucket sizes of DDP and DeAR in MiB.
        steps: Steps that are drawn.
        output: Folder for timeline.json, timeline.md and timeline.png.
    """
    from lightning_pipesync.lab.bench import sweep, timeline_report
    from lightning_pipesync.lab.bench.candidates import makers
    from lightning_pipesync.lab.bench.step import StepSettings
    from lightning_pipesync.lab.bench.timeline import measure_timeline

    if not model.startswith("emulated-"):
        raise ValueError(f"model={model!r}: a timeline is drawn of an emulated model.")
    if {"fsdp2", "zero"} & set(methods):
        raise ValueError(f"methods={methods!r}: what FSDP2 and ZeRO communicate cannot be seen from outside.")
    settings = StepSettings(model, scale, tuple(methods), (ratio,), tuple(bucket_mb), steps, 1)
    num_measurements = len(makers(methods, bucket_mb))
    results = sweep.run(measure_timeline, settings, sweep.make_hosts([hosts], rate, racks, uplink), num_measurements)
    if results:
        sweep.finish("timeline", results, output, timeline_report.as_markdown(results[0]))
        timeline_report.draw(results[0], output / "timeline.png")


def converge(
    hosts: list[int] = [2],  # noqa: B006
    rate: str | None = None,
    racks: int = 1,
    uplink: str | None = None,
    task: str = "digits",
    methods: list[str] = [  # noqa: B006
        "ddp",
        "local_sgd:period=0.25epoch",
        "parameter_server:policy=ssp,staleness_bound=100,servers=1",
        "selsync:delta=0.1",
        "selsync:delta=0.3",
        "selsync:delta=1",
    ],
    target: float | None = None,
    seeds: list[int] = [0],  # noqa: B006
    epochs: int | None = None,
    steps: int | None = None,
    evaluations: int = 24,
    evaluate_on: str = "test",
    labels_per_worker: int | None = None,
    compute: str | None = None,
    slow: list[str] = [],  # noqa: B006
    stalls: str | None = None,
    output: Path = Path("outputs/bench"),
) -> None:
    """Trains to a target with several methods: time, steps and bytes that each needs.

    Args:
        hosts: Numbers of hosts, one rank each. Not used if a launcher has started this process.
        rate: Of each host's link in an emulated network, e.g. 1gbit. Without it the ranks talk over loopback.
        racks: Number of racks in the emulated network.
        uplink: Rate of each rack's link to the others, e.g. 200mbit.
        task: digits (scikit-learn's, accuracy), mnist1d (digits as signals, accuracy), signals (noisy curves,
            accuracy) or topics (the text of Python's documentation, perplexity).
        methods: ddp, dear, local_sgd, parameter_server, pipe_sgd or selsync, each with settings if need be:
            NAME:SETTING=VALUE,SETTING=VALUE, and a pair as injection=0.5:0.5. FedAvg with C and E is
            local_sgd:period=0.25epoch,participation=0.5. With alone, each rank by itself, the table has the limit.
        target: Quality to reach; the task's own if not given.
        seeds: Each method trains once for each of these.
        epochs: Of each training; the task's own if not given.
        steps: The most of each training. A few are enough to time a step of each method.
        evaluations: How often the quality is measured in a training; time and bytes to the target are as fine as that.
        evaluate_on: test, or validation: a tenth of the training data, on which to choose settings.
        labels_per_worker: Number of labels that each rank holds, which makes the data non-IID.
        compute: Emulated computation: the least time of each pass of a rank, e.g. 100ms; it sleeps for the rest.
        slow: HOST:SHARE% for a rank that computes at that share of the speed (3:50%). May be given again.
        stalls: SHARE%:FACTOR for passes that stall at random (5%:10): that share of them takes longer, by an
            exponentially distributed time with a mean of so many times --compute.
        output: Folder for converge.json, converge.md and the pictures.
    """
    from lightning_pipesync.lab.bench import converge_report, sweep
    from lightning_pipesync.lab.bench.converge import ConvergeSettings, measure_converge
    from lightning_pipesync.lab.bench.job import launched
    from lightning_pipesync.lab.papers import host_speed_report, staleness_picture

    settings = ConvergeSettings(
        task=task,
        methods=tuple(methods),
        target=target,
        seeds=tuple(seeds),
        epochs=epochs,
        evaluations=evaluations,
        evaluate_on=evaluate_on,
        labels_per_worker=labels_per_worker,
        steps=steps,
        compute=compute,
        slow=tuple(slow),
        stalls=stalls,
    )
    all_hosts = sweep.make_hosts(hosts, rate, racks, uplink)
    for one in () if launched() else all_hosts:
        settings.host_speeds.check_hosts(one.count)
    num_measurements = len(methods) * len(seeds) * evaluations
    results = sweep.run(measure_converge, settings, all_hosts, num_measurements)
    if results:
        markdown = converge_report.as_markdown(results)
        if compute is not None:
            markdown += "".join("\n" + host_speed_report.as_markdown(result) for result in results)
        sweep.finish("converge", results, output, markdown)
        converge_report.draw(results, output / "converge.png")
        for result in results:
            host_speed_report.draw_errors(result, output / f"errors_{result['world_size']}.png")
            staleness_picture.draw(result, output / f"staleness_{result['world_size']}.png")


def pipeline(
    task: str = "digits",
    model: str = "resnet",
    stages: int = 50,
    methods: list[str] = ["sgd", "pipedream", "spectrain", "naive", "ea_pipe:elastic_force=0.1"],  # noqa: B006
    learning_rates: list[float] = [0.5, 0.1, 0.01],  # noqa: B006
    momentum: float = 0.0,
    weight_decay: float = 5e-4,
    batch_sizes: list[int] = [16],  # noqa: B006
    validation: float = 0.2,
    seeds: list[int] = [0, 1, 2],  # noqa: B006
    epochs: int = 20,
    evaluations: int = 20,
    output: Path = Path("outputs/bench"),
) -> None:
    """Trains with several pipelines at several learning rates, all stages in this process: the error that each leaves.

    Args:
        task: digits (scikit-learn's) or mnist1d (digits as signals); resnet and vgg are for digits.
        model: resnet (50 layers), vgg (25 layers), cnn (the task's own, 11 layers), or mlp (8 dense layers), whose
            trainings are made many at once, some hundred times as fast.
        stages: Number of stages, which is the number of mini-batches in flight.
        methods: sgd (one stage), pipedream, weight_stashing, spectrain, naive or ea_pipe, each with settings if need
            be: NAME:SETTING=VALUE,SETTING=VALUE.
        learning_rates: To begin with; divided by 10 after 30, 60 and 90 % of a training.
        momentum: Of SGD, in each stage.
        weight_decay: Of SGD.
        batch_sizes: Samples of a mini-batch.
        validation: Share of the training set that chooses among learning rates, batch sizes and settings of a method,
            and is not trained on; 0 for none, and no choice.
        seeds: Each method trains once for each of these at each learning rate.
        epochs: Of each training.
        evaluations: How often the error is measured in a training, each time after the pipeline has been emptied.
        output: Folder for pipeline.json, pipeline.md and the pictures.
    """
    from lightning_pipesync.lab.bench import sweep
    from lightning_pipesync.lab.papers import pipeline_report
    from lightning_pipesync.lab.papers.pipeline import PipelineSettings
    from lightning_pipesync.lab.papers.pipeline_grid import measure_pipeline

    settings = PipelineSettings(
        task=task,
        model=model,
        stages=stages,
        methods=tuple(methods),
        learning_rates=tuple(learning_rates),
        momentum=momentum,
        weight_decay=weight_decay,
        batch_sizes=tuple(batch_sizes),
        validation=validation,
        seeds=tuple(seeds),
        epochs=epochs,
        evaluations=evaluations,
    )
    num_trainings = len(methods) * len(learning_rates) * len(batch_sizes) * len(seeds)
    with sweep.progress_bar(f"{stages} stages", num_trainings) as advance:
        result = measure_pipeline(settings, advance)
    sweep.finish("pipeline", [result], output, pipeline_report.as_markdown(result))
    pipeline_report.draw(result, output / "pipeline.png")
    pipeline_report.draw_by_rate(result, output / "pipeline_by_rate.png")
