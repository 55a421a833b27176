// What is wider than its place can be scrolled by keyboard, and a figure says that there is more.
function markWide() {
  document.querySelectorAll("pre, .cell_output figure, .cell_output table, .dz-wide").forEach((place) => {
    const wide = place.scrollWidth > place.clientWidth + 1;
    if (wide) place.tabIndex = 0;
    if (place.tagName === "FIGURE") place.classList.toggle("dz-cut", wide);
  });
}
window.addEventListener("load", markWide);
window.addEventListener("resize", markWide);
