"""Pictures and questions for notebooks: every figure has words, every widget a still form."""

from ddpz_lite.course.show.before_after import collectives
from ddpz_lite.course.show.canvas import figure, house_style
from ddpz_lite.course.show.charts import bars, line_figure, lines
from ddpz_lite.course.show.idle import idle, idle_figure
from ddpz_lite.course.show.loss_charts import loss_against
from ddpz_lite.course.show.memory_charts import memory
from ddpz_lite.course.show.orderings import ordering
from ddpz_lite.course.show.page import figure_html, hint, show_figure
from ddpz_lite.course.show.placements import step_placements
from ddpz_lite.course.show.predictions import Prediction, predict
from ddpz_lite.course.show.quizzes import Answer, Question, Quiz, ask, quiz, right, wrong
from ddpz_lite.course.show.ranks import timeline
from ddpz_lite.course.show.ring import ring_film, ring_steps
from ddpz_lite.course.show.simulated_compute import simulate_compute, simulate_compute_in_unit
from ddpz_lite.course.show.sliders import Explorer, Slider, explore, options, slider
from ddpz_lite.course.show.steps import fastest_step, seconds_of
from ddpz_lite.course.show.style import SERIES, in_bytes, in_seconds, style_of
from ddpz_lite.course.show.traffic import traffic

__all__ = [
    "SERIES",
    "Answer",
    "Explorer",
    "Prediction",
    "Question",
    "Quiz",
    "Slider",
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
    "loss_against",
    "memory",
    "options",
    "ordering",
    "predict",
    "quiz",
    "right",
    "ring_film",
    "ring_steps",
    "seconds_of",
    "show_figure",
    "simulate_compute",
    "simulate_compute_in_unit",
    "slider",
    "step_placements",
    "style_of",
    "timeline",
    "traffic",
    "wrong",
]
