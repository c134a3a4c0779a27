"""The papers' experiments, as far as one machine repeats them, and studies of this package.

Run them in a checkout: ``python -m benchmarks.NAME``. They import the package, which never imports them.

- ``step``, ``timeline``, ``collectives``, ``converge``: ``pipesync bench`` with the papers' networks and baselines,
  parameter servers, and hosts of different speed
- ``staleness``: parameter servers with many learners, in simulated time
- ``large_batches``: accuracy by the size of the global mini-batch
- ``stages``, ``pipeline``: throughput and accuracy of pipelines
- ``scaling``: throughput over the number of workers
- ``batch_cost``: time and memory of a step by mini-batch
- ``sensitivity``: how gradients, the Hessian and the quality change together during a training
- ``weight_density``: the weights of methods in which each rank trains its own
- ``pipe_bound``, ``ea_pipe_bound``: trainings beside the bounds that the papers prove
- ``gossip``: how fast replicas that average with neighbors come together
- ``plan_accuracy``: how far the predictions of ``pipesync plan`` are off
- ``replicas``, ``goodput``: replicas that come and go, beside torchft's DiLoCo
- ``codecs``, ``overhead``, ``selsync_overhead``: what parts of a step cost
- ``results``: all measurements that the docs show (``make results``)
"""
