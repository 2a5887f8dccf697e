/** Which of the two pages this is: `/inspector` has its own script, which a chat never loads. */
import { mount } from "svelte";
import "./ui/theme.css";

const isInspector = /\/inspector\/?$/.test(location.pathname);
const { default: Page } = isInspector
  ? await import("./inspector/Inspector.svelte")
  : await import("./chat/Chat.svelte");
mount(Page, { target: document.body });
