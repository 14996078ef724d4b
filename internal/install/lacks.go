// SPDX-License-Identifier: Apache-2.0

package install

import (
	"fmt"
	"maps"
	"slices"
)

type fields = map[string]any

// depth says how closely to look.
type depth int

const (
	// exactly: what is wanted must be there as this release has it.
	exactly depth = iota
	// byName: a rule or a condition may have another text, and a number another value, if the message or name is
	// still there. An upgrade refines rules, and must not stop the old replicas before the new ones are there.
	byName
)

// identities are the fields that name an element of a list; the first one that an element has counts.
func identities() []string { return []string{"message", "name", "rule", "expression", "jsonPath"} }

// isFormula: the text of the field is one that an upgrade may refine.
func isFormula(key string) bool {
	return key == "rule" || key == "expression" || key == "messageExpression"
}

// isUnread: the field does not matter here. It has words for people, or what an administrator may choose. The rules
// of the webhook are judged apart.
func isUnread(key string) bool {
	switch key {
	case "description", "additionalPrinterColumns", "shortNames", "categories", "timeoutSeconds", "clientConfig", "namespaceSelector", "rules":
		return true
	}
	return false
}

// narrowing are fields that let requests pass unseen: of them, more is less.
func narrowing() []string {
	return []string{"matchConditions", "excludeResourceRules", "objectSelector", "matchResources", "paramRef", "paramKind"}
}

// lacks says, in a sentence for each, what have lacks of want, with the path to it. More is fine.
func lacks(want, have any, path string, d depth) []string {
	switch want := want.(type) {
	case fields:
		have, _ := have.(fields)
		return lacksFields(want, have, path, d)
	case []any:
		have, _ := have.([]any)
		return lacksElements(want, have, path, d)
	}
	_, isNumber := want.(int64)
	if want == have || isNumber && d == byName && have != nil {
		return nil
	}
	return []string{fmt.Sprintf("%s is %s instead of %s", path, show(have), show(want))}
}

func lacksFields(want, have fields, path string, d depth) []string {
	var missing []string
	for _, key := range slices.Sorted(maps.Keys(want)) {
		value, there := have[key]
		at := join(path, key)
		switch {
		case isUnread(key), want[key] == false && !there, isFormula(key) && d == byName:
		case !there:
			missing = append(missing, at+" is missing")
		case isFormula(key) && value != want[key]:
			missing = append(missing, at+" is not that of this release")
		default:
			missing = append(missing, lacks(want[key], value, at, d)...)
		}
	}
	for _, key := range narrowing() {
		missing = append(missing, surplus(want[key], have[key], join(path, key))...)
	}
	return missing
}

// surplus says what a narrowing field has beyond what is wanted.
func surplus(want, have any, path string) []string {
	const consequence = ", so that some requests pass unseen"
	switch have := have.(type) {
	case []any:
		want, _ := want.([]any)
		var more []string
		for _, h := range have {
			if find(want, h) == nil {
				more = append(more, path+" has "+nameOf(h)+consequence)
			}
		}
		return more
	case fields:
		if want == nil && narrows(have) {
			return []string{path + " is set" + consequence}
		}
	}
	return nil
}

// narrows says whether a selector leaves anything out: the API server fills empty ones with defaults.
func narrows(f fields) bool {
	for key, v := range f {
		switch v := v.(type) {
		case fields:
			if narrows(v) {
				return true
			}
		case []any:
			if len(v) > 0 {
				return true
			}
		default:
			if key != "matchPolicy" {
				return true
			}
		}
	}
	return false
}

func lacksElements(want, have []any, path string, d depth) []string {
	var missing []string
	for _, w := range want {
		h := find(have, w)
		switch _, named := identity(w); {
		case h == nil:
			missing = append(missing, path+" lacks "+nameOf(w))
		case named:
			missing = append(missing, lacks(w, h, fmt.Sprintf("%s[%s]", path, nameOf(w)), d)...)
		}
	}
	return missing
}

// find returns the element of a list that is wanted: that of the same name, or, of those without, one that lacks
// nothing of it. A star stands for all.
func find(list []any, want any) any {
	wanted, _ := want.(fields)
	key, named := identity(want)
	for _, element := range list {
		f, isFields := element.(fields)
		switch {
		case named:
			if isFields && f[key] == wanted[key] {
				return element
			}
		case isFields:
			if wanted != nil && len(lacksFields(wanted, f, "", exactly)) == 0 {
				return element
			}
		case wanted == nil && (element == want || element == "*"):
			return element
		}
	}
	return nil
}

// identity returns the key of the field that names an element.
func identity(element any) (string, bool) {
	f, _ := element.(fields)
	for _, key := range identities() {
		if _, ok := f[key].(string); ok {
			return key, true
		}
	}
	return "", false
}

func nameOf(element any) string {
	if key, named := identity(element); named {
		return fmt.Sprintf("%s %q", key, element.(fields)[key]) //nolint:forcetypeassert // what is named has fields
	}
	return show(element)
}

func show(v any) string {
	if v == nil {
		return "nothing"
	}
	return fmt.Sprintf("%q", fmt.Sprint(v))
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}
