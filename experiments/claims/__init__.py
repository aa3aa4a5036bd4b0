"""Fifty claims about sharded training and serving, each settled by commands: `python -m experiments.claims`.

`studies/*.toml` hold a claim each, `plans/*.toml` the plans that several of them ask about, `answers.json` what the
commands answered last, `docs/claims.md` the page that follows from all three.
"""
