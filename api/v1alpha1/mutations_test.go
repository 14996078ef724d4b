// SPDX-License-Identifier: Apache-2.0

package v1alpha1_test

import (
	"fmt"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/runtime"

	"github.com/fencedlease/fencedlease/api/v1alpha1"
)

// mutant is an object with one thing changed, and what it is.
type mutant struct {
	what   string
	object map[string]any
}

// mutants are the object with each leaf of its status changed, removed, or swapped with its neighbour, each list
// longer, shorter and in another order, and each absent field there.
func mutants(object map[string]any) []mutant {
	var all []mutant
	change := func(what string, edit func(status map[string]any)) {
		c := runtime.DeepCopyJSON(object)
		edit(c["status"].(map[string]any))
		all = append(all, mutant{what, c})
	}
	all = append(all, mutant{"status removed", without(object, "status")})
	status, ok := object["status"].(map[string]any)
	if !ok {
		return nil
	}
	for _, key := range slices.Sorted(maps.Keys(status)) {
		walk(status[key], key, func(what string, edit func(any) any) {
			change(what, func(s map[string]any) {
				if v := edit(s[key]); v == nil {
					delete(s, key)
				} else {
					s[key] = v
				}
			})
		})
	}
	for key, value := range map[string]any{
		"cooldownUntil": "2026-01-02T03:05:00.000000Z",
		"holder":        encodeContender(contender(40), "2026-01-02T03:05:00.000000Z"),
	} {
		if _, there := status[key]; !there {
			change("added "+key, func(s map[string]any) { s[key] = value })
		}
	}
	return append(all, swaps(object)...)
}

// walk calls edit for each change of the value under path. An edit that returns nil removes the value.
func walk(value any, path string, edit func(what string, f func(any) any)) {
	set := func(v any) {
		edit(fmt.Sprintf("%s: %v", path, v), func(any) any { return v })
	}
	edit(path+" removed", func(any) any { return nil })
	switch v := value.(type) {
	case int64:
		for _, n := range []any{v + 1, v - 1, int64(0), int64(v1alpha1.MaxToken) + 1, float64(v) + 0.5} {
			set(n)
		}
	case string:
		for _, s := range otherStrings(v) {
			set(s)
		}
	case map[string]any:
		for _, key := range slices.Sorted(maps.Keys(v)) {
			walk(v[key], path+"."+key, func(what string, f func(any) any) {
				edit(what, func(m any) any {
					if changed := f(m.(map[string]any)[key]); changed == nil {
						delete(m.(map[string]any), key)
					} else {
						m.(map[string]any)[key] = changed
					}
					return m
				})
			})
		}
		if _, there := v["podUID"]; !there && v["user"] != nil {
			edit(path+".podUID added", func(m any) any { m.(map[string]any)["podUID"] = "90d0-other"; return m })
		}
	case []any:
		walkList(v, path, edit)
	}
}

func walkList(list []any, path string, edit func(what string, f func(any) any)) {
	edit(path+" with another queue element", func(l any) any {
		return append(l.([]any), encodeContender(contender(41), ""))
	})
	for i := range list {
		if i != 0 && i != len(list)-1 {
			continue // the ends stand for the rest
		}
		at := fmt.Sprintf("%s[%d]", path, i)
		edit(at+" doubled", func(l any) any { return append([]any{runtime.DeepCopyJSONValue(l.([]any)[i])}, l.([]any)...) })
		walk(list[i], at, func(what string, f func(any) any) {
			edit(what, func(l any) any {
				if changed := f(l.([]any)[i]); changed != nil {
					l.([]any)[i] = changed
					return l
				}
				return slices.Delete(l.([]any), i, i+1)
			})
		})
	}
}

// otherStrings are what could stand in place of s: of the same kind, and not.
func otherStrings(s string) []any {
	others := []any{"x"}
	for _, words := range [][]string{
		{"Available", "Held", "Cooldown"},
		{"Released", "Expired", "SessionClosed", "MaxHold", "Stolen", "Invalid"},
	} {
		if slices.Contains(words, s) {
			for _, w := range words {
				if w != s {
					others = append(others, w)
				}
			}
		}
	}
	if len(s) == len("2006-01-02T15:04:05.000000Z") && s[10] == 'T' {
		others = append(others, "2001-01-01T00:00:00.000001Z", "2001-02-30T00:00:00.000001Z", "2001-01-01T00:00:60.000001Z", "2001-01-01T00:00:00Z")
	}
	return others
}

// swaps are the object with two elements of a list, or the holder and one of the queue, in each other's place.
func swaps(object map[string]any) []mutant {
	var all []mutant
	status := object["status"].(map[string]any)
	for _, key := range []string{"queue", "terms"} {
		list, _ := status[key].([]any)
		for _, pair := range [][2]int{{0, 1}, {1, len(list) - 1}} {
			if pair[1] >= len(list) || pair[0] >= pair[1] {
				continue
			}
			c := runtime.DeepCopyJSON(object)
			l := c["status"].(map[string]any)[key].([]any)
			l[pair[0]], l[pair[1]] = l[pair[1]], l[pair[0]]
			all = append(all, mutant{fmt.Sprintf("%s: %d and %d swapped", key, pair[0], pair[1]), c})
		}
	}
	holder, ok := status["holder"].(map[string]any)
	queue, _ := status["queue"].([]any)
	if ok && len(queue) < v1alpha1.MaxQueue {
		c := runtime.DeepCopyJSON(object)
		s := c["status"].(map[string]any)
		s["queue"], s["waiting"] = append(s["queue"].([]any), without(holder, "acquireTime")), s["waiting"].(int64)+1
		all = append(all, mutant{"the holder in the queue as well, and counted", c})
	}
	if len(queue) > 0 && len(queue) < v1alpha1.MaxQueue {
		c := runtime.DeepCopyJSON(object)
		s := c["status"].(map[string]any)
		s["queue"], s["waiting"] = append(s["queue"].([]any), queue[0]), s["waiting"].(int64)+1
		all = append(all, mutant{"the head in the queue twice, and counted", c})
	}
	for i := range min(len(queue), 2) {
		if !ok {
			break
		}
		c := runtime.DeepCopyJSON(object)
		s := c["status"].(map[string]any)
		s["queue"].([]any)[i] = without(holder, "acquireTime")
		swapped := runtime.DeepCopyJSON(queue[i].(map[string]any))
		swapped["acquireTime"] = holder["acquireTime"]
		s["holder"] = swapped
		all = append(all, mutant{fmt.Sprintf("holder and queue[%d] swapped", i), c})
	}
	return all
}

func without(m map[string]any, key string) map[string]any {
	c := runtime.DeepCopyJSON(m)
	delete(c, key)
	return c
}

// encodeContender is a contender as the API server decodes it; with an acquireTime it is a holder.
func encodeContender(c v1alpha1.Contender, acquireTime string) map[string]any {
	m := map[string]any{"identity": c.Identity, "session": c.Session, "sessionUID": string(c.SessionUID), "user": c.User, "ticket": c.Ticket}
	if c.PodUID != "" {
		m["podUID"] = string(c.PodUID)
	}
	if acquireTime != "" {
		m["acquireTime"] = acquireTime
	}
	return m
}
