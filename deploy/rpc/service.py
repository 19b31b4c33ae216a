"""expertmesh.v1.Engine over one front."""

import time
import uuid

import grpc

from expertmesh import __version__
from expertmesh.actors.attention.messages import EngineStats
from expertmesh.actors.model.batch import PAGE_TOKENS
from expertmesh.deploy.front import Front
from expertmesh.deploy.rpc.calls import Call, LiveCalls
from expertmesh.deploy.rpc.gate import CALLER
from expertmesh.deploy.rpc.methods import Reply, handler
from expertmesh.deploy.rpc.requests import field_name
from expertmesh.deploy.rpc.v1 import engine_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["Engine"].full_name
SERVER_TYPE = "expertmesh-grpc"


class EngineService:
    """One method of the .proto each. Failures leave as exceptions; `methods` makes statuses."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._began = time.monotonic()
        self.calls = LiveCalls()

    def handlers(self) -> grpc.GenericRpcHandler:
        front = self._front
        methods = {
            "Generate": handler(front, pb.GenerateRequest, self.generate, field_name),
            "Abort": handler(front, pb.AbortRequest, self.abort),
            "HealthCheck": handler(front, pb.HealthCheckRequest, self.health_check),
            "GetModelInfo": handler(front, pb.GetModelInfoRequest, self.model_info),
            "GetServerInfo": handler(front, pb.GetServerInfoRequest, self.server_info),
            "GetLoads": handler(front, pb.GetLoadsRequest, self.loads),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def generate(self, request: pb.GenerateRequest, reply: Reply, heavy: bool) -> None:
        front, key = self._front, CALLER.get()
        front.check_open(key)
        request_id = request.request_id or uuid.uuid4().hex
        call = Call(front, request, request_id, key)
        with (
            front.traffic.accepted(),
            self.calls.adding("" if key is None else key.name, request_id, call),
        ):
            await call.run(reply, heavy)

    async def abort(self, request: pb.AbortRequest, reply: Reply, heavy: bool) -> None:
        key = CALLER.get()
        aborted = self.calls.abort("" if key is None else key.name, request.request_id)
        await reply(pb.AbortResponse(aborted=aborted))

    async def health_check(self, request: pb.HealthCheckRequest, reply: Reply, heavy: bool) -> None:
        ready, reason = self._front.ready()
        await reply(pb.HealthCheckResponse(healthy=ready, message=reason))

    async def model_info(self, request: pb.GetModelInfoRequest, reply: Reply, heavy: bool) -> None:
        served = self._front.served
        await reply(
            pb.GetModelInfoResponse(
                model_path=served.root,
                is_generation=True,
                max_context_length=served.max_model_len,
                vocab_size=served.vocab_size,
                served_model_name=served.name,
                model_type=served.family,
                eos_token_ids=served.eos,
                model_names=served.names,
                has_tokenizer=served.tokenizer is not None,
                num_layers=served.layers,
                num_moe_layers=served.moe_layers,
                num_experts=served.experts,
                num_experts_per_token=served.top_k,
            )
        )

    async def server_info(
        self, request: pb.GetServerInfoRequest, reply: Reply, heavy: bool
    ) -> None:
        front = self._front
        await reply(
            pb.GetServerInfoResponse(
                active_requests=front.traffic.requests,
                uptime_seconds=time.monotonic() - self._began,
                server_type=SERVER_TYPE,
                version=__version__,
                draining=front.draining,
                max_message_bytes=front.edge.grpc.message_bytes,
                max_request_seconds=front.served.limits.request_seconds,
            )
        )

    async def loads(self, request: pb.GetLoadsRequest, reply: Reply, heavy: bool) -> None:
        stats = await self._front.client.stats()
        loads = [_load(engine, one) for engine, one in stats.items()]
        queued = self._front.admission.waiting
        await reply(pb.GetLoadsResponse(loads=loads, num_queued_reqs=queued))


def _load(engine: str, stats: EngineStats | None) -> pb.SchedulerLoad:
    if stats is None:
        return pb.SchedulerLoad(engine=engine, message="the engine is down")
    used = stats.pages_total - stats.pages_free
    return pb.SchedulerLoad(
        engine=engine,
        num_running_reqs=stats.running,
        num_waiting_reqs=stats.waiting,
        num_total_reqs=stats.running + stats.waiting,
        num_waiting_uncached_tokens=stats.waiting_tokens,
        num_total_pages=stats.pages_total,
        num_used_pages=used,
        page_tokens=PAGE_TOKENS,
        token_usage=used / stats.pages_total if stats.pages_total else 0.0,
        max_running_requests=stats.slots_total,
        num_used_slots=stats.slots_total - stats.slots_free,
        healthy=stats.failed is None,
        message=stats.failed or "",
    )
