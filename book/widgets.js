// Widgets of the site. All their states were made when it was built (states.py); here one is chosen.
document.querySelectorAll(".dz-states").forEach((place) => {
  const { knobs, states, note } = window.dzStates[place.dataset.states];
  const at = knobs.map((knob) => knob.start);
  const shown = document.createElement("div");
  const controls = knobs.map((knob, which) => {
    const label = document.createElement("label");
    const slider = knob.kind === "slider";
    const control = document.createElement(slider ? "input" : "select");
    control.ariaLabel = knob.label;
    label.append(knob.label + " ", control);
    if (slider) Object.assign(control, { type: "range", min: 0, step: 1 });
    else knob.values.forEach((value, place) => control.add(new Option(value, place)));
    control.addEventListener(slider ? "input" : "change", () => {
      at[which] = Number(control.value);
      show();
    });
    place.append(label);
    return control;
  });

  function show() {
    let found = states;
    knobs.forEach((knob, which) => {
      const last = found.length - 1; // of a slider, it depends on the knobs before it
      at[which] = Math.min(at[which], last);
      if (knob.kind === "slider") controls[which].max = last;
      controls[which].value = at[which];
      found = found[at[which]];
    });
    shown.innerHTML = found;
  }

  place.append(shown);
  if (note) {
    const small = document.createElement("small");
    small.textContent = note + " The notebook has more to turn.";
    place.append(small);
  }
  show();
  place.parentElement.querySelectorAll(".dz-still").forEach((still) => (still.hidden = true));
  const output = place.closest(".cell_output") ?? place.parentElement;
  output.querySelectorAll(".dz-still").forEach((still) => (still.hidden = true));
});
