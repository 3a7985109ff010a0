// What is wider than the page scrolls by itself: the keyboard reaches it too.
function reach() {
  for (const part of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) {
    if (part.scrollWidth > part.clientWidth) {
      part.tabIndex = 0
    } else {
      part.removeAttribute("tabindex")
    }
  }
}

addEventListener("load", reach)
addEventListener("resize", reach)
