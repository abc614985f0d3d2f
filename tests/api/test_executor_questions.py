"""A client's queries against a manager's socket under the test's control."""

from __future__ import annotations

import pytest
from polling import PATIENCE_S

from stoker.manager.executor.outgoing import wait_for_answer
from stoker.protocol import to_client, to_manager


def test_questions_are_asked_again_after_a_break(link, router, until):
    story = link.ask_story("c-1")
    router.hear(to_manager.AskStory)
    assert all(sequence == 0 for sequence, messages in router.frames if isinstance(messages[0], to_manager.AskStory))
    router.hang_up()
    until(lambda: not link._joined.is_set())
    router.frames.clear()
    router.listen()
    router.welcome()
    assert router.hear(to_manager.AskStory)[0].subject == "c-1"
    router.say(to_client.Story("c-1", True, "headline", ()))
    assert story.result(PATIENCE_S).headline == "headline"


def test_cancelled_questions_take_no_answer_of_others(link, router):
    for number in range(5):
        asked = link.ask_story(f"c-{number}")
        router.hear(to_manager.AskStory, count=number + 1)  # one that is given up before it has left never leaves
        with pytest.raises(TimeoutError):
            wait_for_answer(asked, timeout_s=0)
    story = link.ask_story("c-5")
    assert len(link._questions) == 1
    heard = router.hear(to_manager.AskStory, count=6)
    router.say(*[to_client.Story(question.subject, True, "headline", ()) for question in heard])
    assert story.result(PATIENCE_S).subject == "c-5"
    assert len(link._questions) == 0


def test_cancelled_question_is_not_asked_again(link, router, until):
    gone, kept = link.ask_story("c-1"), link.ask_story("c-2")
    router.hear(to_manager.AskStory, count=2)
    gone.cancel()
    router.hang_up()
    until(lambda: not link._joined.is_set())
    router.frames.clear()
    router.listen()
    router.welcome()
    assert [question.subject for question in router.hear(to_manager.AskStory)] == ["c-2"]
    router.say(to_client.Story("c-2", True, "headline", ()))
    assert kept.result(PATIENCE_S).subject == "c-2"
