// Widgets of the site. All their states were made when it was built (states.py); here one is chosen.
document.querySelectorAll(".dz-states").forEach((place) => {
  const { sliders, states, note } = window.dzStates[place.dataset.states];
  const at = sliders.map((slider) => slider.start);
  const shown = document.createElement("div");
  const controls = sliders.map((slider, which) => {
    const label = document.createElement("label");
    const isSlider = slider.kind === "slider";
    const control = document.createElement(isSlider ? "input" : "select");
    control.ariaLabel = slider.label;
    label.append(slider.label + " ", control);
    if (isSlider) Object.assign(control, { type: "range", min: 0, step: 1 });
    else slider.values.forEach((value, place) => control.add(new Option(value, place)));
    control.addEventListener(isSlider ? "input" : "change", () => {
      at[which] = Number(control.value);
      show();
    });
    place.append(label);
    return control;
  });

  function show() {
    let found = states;
    sliders.forEach((slider, which) => {
      const last = found.length - 1; // of a slider, it depends on the sliders before it
      at[which] = Math.min(at[which], last);
      if (slider.kind === "slider") controls[which].max = last;
      controls[which].value = at[which];
      found = found[at[which]];
    });
    shown.innerHTML = found;
  }

  place.append(shown);
  if (note) {
    const small = document.createElement("small");
    small.textContent = note + " The notebook has more sliders.";
    place.append(small);
  }
  show();
  place.parentElement.querySelectorAll(".dz-still").forEach((still) => (still.hidden = true));
  const output = place.closest(".cell_output") ?? place.parentElement;
  output.querySelectorAll(".dz-still").forEach((still) => (still.hidden = true));
});
