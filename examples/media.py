"""Pictures, sound, tables, histograms and text beside the numbers: python examples/media.py

Each is copied when it is logged and encoded in another thread, so the loop does not wait. `fanfold show -` lists them.
"""

import numpy as np

import fanfold

rng = np.random.default_rng(0)
run = fanfold.init("media")
for step in range(3):
    noise = rng.random((32, 32, 3))  # height x width x channels, floats between 0 and 1
    tone = np.sin(np.arange(8000) * (400 + 200 * step) * 2 * np.pi / 8000)
    table = fanfold.Table(["word", "score"], [["cat", 0.9 - step / 10], ["dog", 0.1 + step / 10]])
    run.log(
        {
            "picture": fanfold.Image(noise, caption=f"noise at step {step}"),
            "tone": fanfold.Audio(tone, sample_rate=8000),
            "weights": fanfold.Histogram(rng.normal(size=1000)),
            "scores": table,
            "remark": f"step {step} went well",
            "mean": noise.mean(),
        },
        step=step,
    )
run.finish()

stored = fanfold.open(run.path)
print("media:", ", ".join(f"{key} ({stored.media(key)[0].kind}, {len(stored.media(key))})" for key in stored.keys("media")))
print("last table:", stored.table("scores").rows)
print("picture:", stored.media("picture")[-1].load().array().shape)
