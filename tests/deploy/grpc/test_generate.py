"""What Generate answers: the same as HTTP, in messages."""

import grpc.aio
import pytest

from expertmesh.actors.attention.messages import SamplingParams
from expertmesh.deploy.rpc.v1 import engine_pb2 as pb
from expertmesh.deploy.rpc.v1.engine_pb2_grpc import EngineStub
from tests.support.door import Door
from tests.support.fake_client import FakeEngineClient
from tests.support.grpc_calls import Answer, ask
from tests.support.grpc_server import GrpcThread

PROMPTS = ["hello world", "a", "Once upon a time " * 8, [1, 2, 3, 4, 5]]


class TestRealModel:
    @pytest.mark.parametrize("prompt", PROMPTS)
    @pytest.mark.parametrize("stream", [True, False])
    def test_the_answer_is_http_s(
        self, real_engine: EngineStub, real: Door, prompt: str | list[int], stream: bool
    ) -> None:
        fields = {"max_tokens": 24, "logprobs": 2, "ignore_eos": True}
        want = real.complete(prompt, temperature=0, return_token_ids=True, **fields)
        request = ask(prompt, stream=stream, **fields)
        answer = Answer(real_engine.Generate(request, timeout=60))
        choice, end = want["choices"][0], answer.ends[0]
        assert answer.text() == choice["text"]
        assert end.output_ids == choice["token_ids"]
        assert end.finish_reason == choice["finish_reason"] == "length"
        assert end.prompt_tokens == want["usage"]["prompt_tokens"]
        assert end.completion_tokens == want["usage"]["completion_tokens"]
        parts = [chunk.output_logprobs for chunk in answer.chunks[0]] if stream else [
            end.output_logprobs
        ]  # fmt: skip
        found = [value for part in parts for value in part.token_logprobs]
        assert found == pytest.approx(choice["logprobs"]["token_logprobs"], rel=1e-6)
        assert [i for part in parts for i in part.token_ids] == end.output_ids
        assert {len(top.values) for part in parts for top in part.top_logprobs} == {2}

    def test_sampled_choices_are_http_s_for_a_seed(
        self, real_engine: EngineStub, real: Door
    ) -> None:
        # 0.7 has no exact float32: a narrower field would sample other tokens now and then.
        fields = {"max_tokens": 16, "temperature": 0.7, "top_p": 0.9, "seed": 5, "n": 3}
        want = real.complete("hello", **fields)
        answer = Answer(real_engine.Generate(ask("hello", **fields), timeout=60))
        texts = [choice["text"] for choice in want["choices"]]
        assert [answer.text(index) for index in range(3)] == texts
        assert len(set(texts)) > 1

    def test_texts_of_random_weights_are_whole_characters(self, real_engine: EngineStub) -> None:
        """Bytes that are no UTF-8 are what such a model makes most of."""
        calls = [
            real_engine.Generate(
                ask([60 + n], max_tokens=8, temperature=1.5, seed=n, ignore_eos=True), timeout=90
            )
            for n in range(100)
        ]
        answers = [Answer(call) for call in calls]
        assert all(answer.ends[0].finish_reason == "length" for answer in answers)
        assert sum("\ufffd" in answer.text() for answer in answers) > 50

    def test_scores_a_prompt(self, real_engine: EngineStub, real: Door) -> None:
        ids = [10, 20, 30, 40]
        want = real.complete(ids, max_tokens=0, echo=True, logprobs=3)["choices"][0]["logprobs"]
        answer = Answer(real_engine.Generate(ask(ids, max_tokens=0, prompt_logprobs=3), timeout=30))
        assert answer.ends[0].finish_reason == "length" and not answer.ends[0].output_ids
        scored = answer.chunks[0][0].input_logprobs
        assert scored.token_ids == ids
        assert not scored.token_logprobs[0].HasField("value")
        found = [entry.value for entry in scored.token_logprobs[1:]]
        assert found == pytest.approx(want["token_logprobs"][1:], rel=1e-6)
        assert [len(top.values) for top in scored.top_logprobs] == [0, 3, 3, 3]

    def test_tells_where_tokens_went(self, real_engine: EngineStub, real: Door) -> None:
        request = ask("hello", max_tokens=3, return_routed_experts=True, ignore_eos=True)
        end = Answer(real_engine.Generate(request, timeout=30)).ends[0]
        assert end.routed_experts.startswith(b"\x93NUMPY")

    def test_the_aio_client(self, real_grpc: GrpcThread, real_engine: EngineStub) -> None:
        import asyncio

        async def main() -> Answer:
            async with grpc.aio.insecure_channel(real_grpc.address) as channel:
                call = EngineStub(channel).Generate(ask("hello", max_tokens=8), timeout=30)
                return Answer([message async for message in call])

        want = Answer(real_engine.Generate(ask("hello", max_tokens=8), timeout=30))
        assert asyncio.run(main()).text() == want.text()


class TestFields:
    def params(self, fake: FakeEngineClient) -> SamplingParams:
        return fake.requests[-1].params

    def test_an_unset_field_is_http_s_default(
        self, engine: EngineStub, fake: FakeEngineClient
    ) -> None:
        list(engine.Generate(pb.GenerateRequest(text="hello")))
        assert self.params(fake) == SamplingParams(max_tokens=16)
        assert fake.requests[-1].priority == 0

    def test_an_explicit_zero_is_a_zero(self, engine: EngineStub, fake: FakeEngineClient) -> None:
        zeros = pb.SamplingParams(
            temperature=0, seed=0, min_p=0, max_tokens=0, min_tokens=0, logprobs=0,
            prompt_logprobs=0, skip_special_tokens=False, frequency_penalty=0, presence_penalty=0,
        )  # fmt: skip
        messages = list(engine.Generate(pb.GenerateRequest(text="hi", sampling_params=zeros)))
        found = self.params(fake)
        assert (found.temperature, found.seed, found.max_tokens) == (0, 0, 0)
        assert (found.logprobs, found.prompt_logprobs) == (0, 0)
        assert messages[-1].complete.finish_reason == "length"

    def test_every_field_arrives(self, engine: EngineStub, fake: FakeEngineClient) -> None:
        request = ask(
            "hello", temperature=0.3, top_p=0.5, top_k=7, min_p=0.25, frequency_penalty=-1.5,
            presence_penalty=1.5, repetition_penalty=1.25, max_tokens=9, min_tokens=2,
            stop_token_ids=[5, 6], ignore_eos=True, n=2, logprobs=3, prompt_logprobs=1,
            seed=-1, logit_bias={7: -100, 8: 2.5}, priority=-3, stop=["never"],
        )  # fmt: skip
        assert len(Answer(engine.Generate(request)).ends) == 2
        first, second = fake.requests[-2:]
        assert first.params == SamplingParams(
            temperature=0.3, top_p=0.5, top_k=7, min_p=0.25, frequency_penalty=-1.5,
            presence_penalty=1.5, repetition_penalty=1.25, max_tokens=9, min_tokens=2,
            stop_token_ids=[5, 6], ignore_eos=True, logprobs=3, prompt_logprobs=1,
            seed=2**63 - 1, logit_bias={7: -100.0, 8: 2.5},
        )  # fmt: skip
        assert (first.priority, second.params.seed) == (-3, 0)

    def test_stops(self, engine: EngineStub, fake: FakeEngineClient) -> None:
        end = Answer(engine.Generate(ask("ab END cd", stop=["END"], max_tokens=30))).ends[0]
        assert (end.text, end.finish_reason, end.matched_stop_str) == ("ab ", "stop", "END")
        request = ask("ab END", stop=["END"], include_stop_str_in_output=True, stream=False)
        assert Answer(engine.Generate(request)).ends[0].text == "ab END"
        end = Answer(engine.Generate(ask([65, 66, 67], stop_token_ids=[67]))).ends[0]
        assert end.text == "AB" and end.output_ids == [65, 66, 67]
        assert end.matched_token_id == 67 and end.WhichOneof("matched_stop") == "matched_token_id"

    def test_the_model_s_own_end_is_no_matched_stop(
        self, engine: EngineStub, fake: FakeEngineClient
    ) -> None:
        end = Answer(engine.Generate(ask([65, min(fake.eos)]))).ends[0]
        assert end.finish_reason == "stop" and end.WhichOneof("matched_stop") is None

    def test_characters_over_tokens_come_whole(
        self, engine: EngineStub, fake: FakeEngineClient
    ) -> None:
        fake.seconds = 0.002
        text = "añ€\U0001f600e\u0301"
        ids = list(text.encode())
        answer = Answer(engine.Generate(ask(ids, max_tokens=len(ids))))
        assert answer.text() == text
        assert "\ufffd" not in "".join(chunk.text for chunk in answer.chunks[0])

    def test_request_ids(self, engine: EngineStub) -> None:
        assert Answer(engine.Generate(ask(request_id="my-id"))).ids == {"my-id"}
        made = [Answer(engine.Generate(ask(request_id=""))).ids for _ in range(2)]
        assert all(len(ids) == 1 for ids in made) and made[0] != made[1]

    def test_without_chunks_there_is_one_message(self, engine: EngineStub) -> None:
        request = ask("hello", stream=False, max_tokens=7, logprobs=1, prompt_logprobs=0)
        (message,) = engine.Generate(request)
        assert len(message.complete.output_logprobs.token_logprobs) == 7
        assert len(message.complete.input_logprobs.token_logprobs) == message.complete.prompt_tokens


def test_tells_of_the_model(real_engine: EngineStub, real: Door) -> None:
    info = real_engine.GetModelInfo(pb.GetModelInfoRequest())
    card = real.http.get("/v1/models").json()["data"][0]
    assert (info.served_model_name, info.max_context_length) == (card["id"], card["max_model_len"])
    assert info.model_type in ("kimi_k3", "kimi_linear") and info.has_tokenizer
    assert (info.num_layers, info.vocab_size) == (4, 512)
    assert info.num_experts >= info.num_experts_per_token > 0 and info.eos_token_ids


def test_tells_of_the_server_and_its_loads(
    server: GrpcThread, engine: EngineStub, fake: FakeEngineClient
) -> None:
    info = engine.GetServerInfo(pb.GetServerInfoRequest())
    assert info.server_type == "expertmesh-grpc" and info.uptime_seconds > 0
    assert info.max_message_bytes == server.front.edge.grpc.message_bytes
    assert not info.draining and info.active_requests == 0
    (load,) = engine.GetLoads(pb.GetLoadsRequest()).loads
    assert (load.engine, load.num_total_pages, load.num_used_pages) == ("0", 8, 2)
    assert load.token_usage == 0.25 and load.healthy
