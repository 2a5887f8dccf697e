/** The languages whose code is coloured, with all their other names. */
import highlighter from "highlight.js/lib/core";
import bash from "highlight.js/lib/languages/bash";
import cpp from "highlight.js/lib/languages/cpp";
import go from "highlight.js/lib/languages/go";
import java from "highlight.js/lib/languages/java";
import javascript from "highlight.js/lib/languages/javascript";
import json from "highlight.js/lib/languages/json";
import python from "highlight.js/lib/languages/python";
import sql from "highlight.js/lib/languages/sql";
import typescript from "highlight.js/lib/languages/typescript";
import xml from "highlight.js/lib/languages/xml";

const LANGUAGES = { bash, cpp, go, java, javascript, json, python, sql, typescript, xml };
for (const [name, language] of Object.entries(LANGUAGES)) highlighter.registerLanguage(name, language);

export default highlighter;
