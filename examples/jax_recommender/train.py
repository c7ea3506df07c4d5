"""Train a recommender with JAX and optax, and save it with scarctl: four lines more.

python examples/jax_recommender/train.py --store run
python examples/jax_recommender/train.py --kill

With --kill this starts itself, kills that process with SIGKILL, starts it again with the same command, and says what
was lost; and trains once undisturbed, to compare.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 120
USERS, ITEMS, WIDTH, BATCH = 4000, 3000, 16, 512


def train(store: Path, steps: int) -> None:
    """Train, or continue, until all steps are done. The step is given the state's memory."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from scarctl_adapters.jax import attach

    tx = optax.adam(0.02)
    users, items = jax.random.split(jax.random.key(0))
    params = {
        "users": 0.1 * jax.random.normal(users, (USERS, WIDTH)),
        "items": 0.1 * jax.random.normal(items, (ITEMS, WIDTH)),
    }
    taste = np.random.default_rng(1).normal(size=(USERS + ITEMS, 4)).astype(np.float32)

    def batch(number: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        rng = np.random.default_rng(number)
        user, item = rng.zipf(1.3, BATCH) % USERS, rng.zipf(1.3, BATCH) % ITEMS
        stars = (taste[user] * taste[USERS + item]).sum(1)
        return jnp.asarray(user), jnp.asarray(item), jnp.asarray(stars)

    def step(state, user, item, stars):
        def loss(params):
            found = (params["users"][user] * params["items"][item]).sum(1)
            return ((found - stars) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, value

    step = jax.jit(step, donate_argnums=0)
    state = {"params": params, "opt_state": tx.init(params)}
    with attach(state, store=store, interval=4, donated=True) as session:
        state = session.resume()
        label = "consistent" if session.resumed.consistent else "mixed"
        print(f"resumed after step {session.head_step}, {label}", flush=True)
        for number in range(session.head_step + 1, steps + 1):
            state, loss = step(state, *batch(number))
            state = session.step(state)
            if number % 10 == 0:
                print(f"step {number}: loss {loss:.4f}", flush=True)


def kill(folder: Path, steps: int) -> None:
    """Kill a training halfway, start it again, compare."""
    half = steps // 20 * 10 + 10
    # First the undisturbed one: it starts the daemon, which then serves the others from their first step.
    undisturbed = _run(folder / "undisturbed", steps)
    before = _run(folder / "run", steps, until=f"step {half}:")
    after = _run(folder / "run", steps)
    again = int(after[0].split()[3].rstrip(","))
    died = int(before[-1].split()[1].rstrip(":"))
    print(f"killed after step {died}; continued after step {again}, {after[0].split()[-1]}")
    print(f"in the end: {after[-1]}; undisturbed: {undisturbed[-1].partition(': ')[2]}")


def _run(store: Path, steps: int, *, until: str | None = None) -> list[str]:
    """Train in another process, and kill it when it prints `until`. Returns its lines."""
    command = [sys.executable, __file__, "--store", str(store), "--steps", str(steps)]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line.rstrip())
            print(f"  {line}", end="", flush=True)
            if until is not None and line.startswith(until):
                child.send_signal(signal.SIGKILL)
                print(f"  kill -9 {child.pid}", flush=True)
                break
        else:
            if child.wait() or until is not None:
                sys.exit("that training did not end as it should")
    return lines


def main() -> None:
    """Train, or kill a training."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--store", type=Path, help="where to save; needed without --kill")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--kill", action="store_true", help="kill a training and start it again")
    arguments = parser.parse_args()
    if arguments.steps < 40:
        parser.error("--steps is below 40")
    if arguments.kill:
        with tempfile.TemporaryDirectory(prefix="scarctl-jax-") as folder:
            kill(Path(folder), arguments.steps)
    elif arguments.store is None:
        parser.error("--store is missing")
    else:
        train(arguments.store, arguments.steps)


if __name__ == "__main__":
    main()
