"""The code of python-api.md, in its order; mypy checks it in strict mode."""

from simulator import Cluster, Model, Plan, predict

model = Model.load("llama3-8b")
cluster = Cluster.load("hgx-h100-8")
plan = Plan(dp_shard=8, seq_len=8192).copy_with(recompute="selective")
prediction = predict(model, plan, cluster)
print(prediction)

seconds, low, high = prediction.step_s, prediction.low_s, prediction.high_s
owners: dict[str, int] = prediction.memory.by_category
longest = max(prediction.breakdown, key=lambda part: prediction.breakdown[part])

from simulator import Fit

if prediction.verdict is Fit.TIGHT:
    print(prediction.needs, prediction.cause)
if not prediction.fits:
    raise SystemExit(prediction.verdict.exit_code)

data = prediction.to_dict()  # as `shardwise predict --json`
text = prediction.to_json()
prediction.plot_memory().save("memory.svg")
prediction.plot_timeline().save("timeline.png")

from simulator import search

report = search(
    model,
    cluster,
    global_batch=64,
    seq_len=8192,
    fix={"tp": 1, "pp": 1, "cp": 1, "zero": 3, "recompute": ["selective", "full"]},
    top=3,
)
for row in report.rows:
    print(row.rank, row.outcome.status, row.outcome.step_s, row.plan.recompute.mode)

from simulator import InferencePlan, Slo, Workload, serve

served = serve(model, InferencePlan(tp=2), cluster, Workload(rate=4, num_requests=200), slo=Slo(ttft_s=0.5))
if served.latencies is not None:
    print(served.verdict, served.latencies.ttft.p99_s, served.memory.kv_tokens)

from simulator import search_serving

plans = search_serving(
    model,
    cluster,
    Workload(rate=40, num_requests=100),
    Slo(ttft_s={95: 0.3}, tpot_s={95: 0.03}),
    fix={"pp": 1},
    max_gpus=2,
)
for found in plans.rows:
    print(found.answer.num_devices, found.answer.plan.tp, found.answer.plan.dp, found.tokens_per_s_gpu)

from simulator import InputError

try:
    Plan(dp_shrad=8, seqlen=8192)  # type: ignore[call-arg]
except InputError as error:
    for fault in error.faults:
        print(fault.place, fault.problem, fault.remedy, sep=": ")
