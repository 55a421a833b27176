"""Pictures and questions for notebooks: every figure has words, every widget a still form."""

from ddpz_lite.course.show.before_after import collectives
from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.charts import bars, line_figure, lines
from ddpz_lite.course.show.held import memory
from ddpz_lite.course.show.idle import idle, idle_figure
from ddpz_lite.course.show.knobs import Explorer, Knob, explore, options, slider
from ddpz_lite.course.show.letters import step_letters
from ddpz_lite.course.show.naps import napping, napping_unit
from ddpz_lite.course.show.orderings import ordering
from ddpz_lite.course.show.page import figure_html, hint, show_figure
from ddpz_lite.course.show.predictions import Prediction, predict
from ddpz_lite.course.show.quizzes import Answer, Question, Quiz, ask, quiz, right, wrong
from ddpz_lite.course.show.ranks import timeline
from ddpz_lite.course.show.ring import ring_film, ring_steps
from ddpz_lite.course.show.sent import traffic
from ddpz_lite.course.show.spent import loss_against
from ddpz_lite.course.show.steps import fastest_step, seconds_of
from ddpz_lite.course.show.style import SERIES, in_bytes, in_seconds, look

__all__ = [
    "SERIES",
    "Answer",
    "Explorer",
    "Knob",
    "Prediction",
    "Question",
    "Quiz",
    "ask",
    "bars",
    "collectives",
    "explore",
    "fastest_step",
    "figure",
    "figure_html",
    "hint",
    "house_style",
    "idle",
    "idle_figure",
    "in_bytes",
    "in_seconds",
    "line_figure",
    "lines",
    "look",
    "loss_against",
    "memory",
    "napping",
    "napping_unit",
    "options",
    "ordering",
    "predict",
    "quiz",
    "right",
    "ring_film",
    "ring_steps",
    "seconds_of",
    "show_figure",
    "slider",
    "step_letters",
    "timeline",
    "traffic",
    "wrong",
]
