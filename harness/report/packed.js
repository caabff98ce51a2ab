// Long tables come deflated (packed.py): they are set before anything else looks at the page.
for (const template of document.querySelectorAll("template.packed")) {
  const bytes = Uint8Array.from(atob(template.content.textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  template.innerHTML = await new Response(stream).text();
  template.replaceWith(template.content);
}
// An address that leads to a place inside: until now there was none.
if (document.querySelector(":target") === null && location.hash) document.getElementById(location.hash.slice(1))?.scrollIntoView();
