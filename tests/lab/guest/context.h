// SPDX-License-Identifier: Apache-2.0
// Return the text of the context ISO's context.sh (to be freed), or NULL when there is none.
char *read_context(void);
