"""What `expertmesh serve` prints before and when it serves."""

import time
from collections import Counter

from rich.console import Console

from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.actors.model.config import ModelConfig
from expertmesh.actors.model.loading import placed
from expertmesh.actors.model.summary import CheckpointSummary
from expertmesh.deploy import preflight
from expertmesh.deploy.openai.admin import is_loopback
from expertmesh.deploy.preflight import size_text
from expertmesh.deploy.serve_options import ServeOptions
from expertmesh.kernels.registry import resolve


def _compute(options: ServeOptions) -> str:
    """In what, and by which kernels; as asked for where other machines decide."""
    if options.address is not None:
        return f"{options.dtype} dtype, {options.kernels} kernels"
    kind, dtype = placed("auto", options.compute)
    by = Counter(resolve(options.kernels, kind, dtype).values())
    shares = ", ".join(f"{count} of {backend}" for backend, count in by.most_common())
    return f"{str(dtype).removeprefix('torch.')} on {kind}, kernels: {shares}"


def print_plan(
    console: Console, options: ServeOptions, config: ModelConfig, summary: CheckpointSummary
) -> None:
    actors = (
        "one process"
        if options.one_process
        else f"{options.attention_replicas} attention + {options.expert_actors} expert actors"
    )
    parameters = summary.attention.parameters + summary.experts.parameters
    console.print(
        f"[bold]{options.served_name}[/] ({config.family}, {parameters / 1e6:.1f} M parameters, "
        f"{config.num_layers} layers, {config.num_experts} experts, "
        f"{config.experts_per_token} per token)"
    )
    console.print(
        f"  weights   {size_text(summary.text_bytes)} in {summary.shards} "
        f"shard{'s' if summary.shards > 1 else ''}, {actors}"
    )
    console.print(f"  compute   {_compute(options)}")
    state = preflight.state_bytes(config, options.engine(config), 4)
    console.print(
        f"  state     {options.kv_pages} pages of {PAGE_TOKENS} tokens, {options.max_running} "
        f"slots, {size_text(state)} per replica; {options.context(config)} tokens a request"
    )
    console.print(f"  cache     {_cache(options, config)}")
    console.print(f"  address   {url_of(options)}")
    if not options.asks_for_keys and not is_loopback(options.host):
        console.print(
            "[yellow]warning[/]: whoever reaches this address may use the server; `expertmesh keys "
            "new` and --api-keys change that"
        )
    asked, given = options.max_model_len, options.context(config)
    if asked is not None and asked > given:
        console.print(
            f"[yellow]warning[/]: --max-model-len {asked} is cut to {given}: the model knows "
            f"{config.max_position} positions, and --kv-pages {options.kv_pages} hold "
            f"{options.kv_pages * PAGE_TOKENS} tokens of requests that are all on the device"
        )


def _cache(options: ServeOptions, config: ModelConfig) -> str:
    """What is kept of prompts, and where."""
    engine = options.engine(config)
    state, memory = engine.state, preflight.host_bytes(config, engine, 4)
    if not state.prefix_cache and state.disk is None:
        return "off"
    places = [f"{state.snapshots} snapshots on the device"]
    if memory:
        places.append(f"{size_text(memory)} of host memory per replica")
    if state.disk is not None:
        places.append(f"{size_text(state.disk_bytes or 0)} in {state.disk}")
    mode = ""
    if state.kv_mode != "exact":
        mode = f"; old tokens: {state.kv_mode}, {size_text(state.offload_bytes)} of host memory"
        if state.offload_disk_bytes:
            mode += f" and {size_text(state.offload_disk_bytes)} of disk per replica"
    return f"{', '.join(places)}, {state.codec}{mode}"


def url_of(options: ServeOptions) -> str:
    host = f"[{options.host}]" if ":" in options.host else options.host
    scheme = "http" if options.edge.http.tls is None else "https"
    return f"{scheme}://{host}:{options.port}"


def announce(console: Console, options: ServeOptions, began: float) -> None:
    url, name = url_of(options), options.served_name
    # Without a tokenizer the server takes token ids only.
    key = ' -H "authorization: Bearer $EXPERTMESH_API_KEY"' if options.asks_for_keys else ""
    prompt = '"Once upon a time"' if preflight.has_tokenizer(options.model) else "[1, 2, 3]"
    console.print(f"[bold green]ready[/] after {time.monotonic() - began:.1f} s at {url}")
    console.print(
        f"  curl {url}/v1/completions -H 'content-type: application/json'{key} "
        f'-d \'{{"model": "{name}", "prompt": {prompt}, "max_tokens": 40}}\'',
        markup=False,
    )


def print_mesh(
    console: Console, options: ServeOptions, config: ModelConfig, slots: int | None
) -> None:
    actors, experts = options.expert_actors, config.num_experts
    if actors:
        each = options.cluster(config, slots).slots(experts, actors)
        safe = (actors - 1) * each >= experts
        console.print(
            f"  experts   {each} slots per actor and layer, {actors * each - experts} spare in "
            "all; "
            + ("any one actor can be lost" if safe else "a lost actor has to be replaced first")
        )
    scaling = options.autoscale(config)
    if scaling is not None:
        pools = []
        if scaling.experts is not None:
            limits = scaling.experts
            pools.append(f"{limits.min_actors} to {limits.max_actors} expert actors")
        if scaling.attention is not None:
            replicas = scaling.attention
            pools.append(f"{replicas.min_replicas} to {replicas.max_replicas} attention replicas")
        mode = " (dry run: decisions are only logged)" if scaling.dry_run else ""
        console.print(f"  scaling   {', '.join(pools)}{mode}")
