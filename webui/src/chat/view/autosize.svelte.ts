/** A field that is as high as its text; how high at most, its style sheet says. */
import type { Attachment } from "svelte/attachments";

/** `text` is what the field holds: reading it here makes the height follow it, also where it is set from elsewhere. */
export function autosize(text: () => string): Attachment<HTMLTextAreaElement> {
  return (field) => {
    $effect(() => {
      text();
      field.style.height = "auto";
      field.style.height = `${field.scrollHeight}px`;
    });
  };
}
