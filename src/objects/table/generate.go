// Command generate reads the Go types of Kubernetes' API by reflection and adds them to a table of types, and values of
// every kind to test vectors.
//
//	generate table.json vectors.json
//
// src/objects/table/generate runs it once for each minor version of Kubernetes, oldest first. What a newer version
// has replaces what is in the files. imports.go, which the script writes, has the groups and versions.
package main

import (
	"cmp"
	"encoding/json"
	"log"
	"maps"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// Field is a field of a message. Type is its wire and JSON type:
//
//	s string, b bool, i integer, y bytes; types of Kubernetes whose JSON is not that of their fields: T Time,
//	M MicroTime, Q Quantity, I IntOrString, J RawExtension and FieldsV1, L ExtraValue and other lists of strings
//	with a name. Any other text is the name of a message.
type Field struct {
	Number int
	// Name is the JSON name. It is empty if the fields of the message are in the JSON object of its parent.
	Name string
	Type string
	// Shape is "" for one value, "list" or "map" (with string keys).
	Shape string `json:",omitempty"`
	// Pointer says that the field is absent or null unless it is encoded.
	Pointer bool `json:",omitempty"`
	// Omit says that an empty value is left out.
	Omit bool `json:",omitempty"`
	// Kind is the API version and kind that API servers add to the value, such as v1/PersistentVolumeClaim.
	Kind string `json:",omitempty"`
}

// Table is what is generated.
type Table struct {
	// Kinds has the message of each API version and kind.
	Kinds map[string]string
	// Types has the fields of each message, by name.
	Types map[string][]Field
}

// own has the types whose JSON is not that of their fields.
var own = map[string]string{
	"k8s.io/apimachinery/pkg/apis/meta/v1.Time":       "T",
	"k8s.io/apimachinery/pkg/apis/meta/v1.MicroTime":  "M",
	"k8s.io/apimachinery/pkg/apis/meta/v1.FieldsV1":   "J",
	"k8s.io/apimachinery/pkg/api/resource.Quantity":   "Q",
	"k8s.io/apimachinery/pkg/util/intstr.IntOrString": "I",
	"k8s.io/apimachinery/pkg/runtime.RawExtension":    "J",
}

type generator struct {
	table Table
	seen  map[string]bool
	// kinds has the API version and kind of each Go type that is one.
	kinds map[reflect.Type]string
}

func typeName(t reflect.Type) string { return t.PkgPath() + "." + t.Name() }

// message adds the fields of a struct, or of a list that is a message of its own, and returns its name.
func (g *generator) message(t reflect.Type) string {
	name := typeName(t)
	if g.seen[name] {
		return name
	}
	g.seen[name] = true
	fields := map[int]Field{}
	for _, f := range g.table.Types[name] {
		// A field that this version no longer has is in the JSON only if it is encoded.
		if !f.Omit {
			f.Pointer, f.Omit = true, true
		}
		fields[f.Number] = f
	}
	for _, f := range g.fields(t) {
		if before, ok := fields[f.Number]; ok && (before.Name != f.Name || before.Type != f.Type) {
			log.Printf("%s: field %d was %s (%s) and is now %s (%s)", name, f.Number, before.Name, before.Type, f.Name, f.Type)
		}
		fields[f.Number] = f
	}
	g.table.Types[name] = slices.SortedFunc(maps.Values(fields), func(a, b Field) int { return cmp.Compare(a.Number, b.Number) })
	return name
}

func (g *generator) fields(t reflect.Type) []Field {
	var all []Field
	for i := range t.NumField() {
		f := t.Field(i)
		protobuf := strings.Split(f.Tag.Get("protobuf"), ",")
		names := strings.Split(f.Tag.Get("json"), ",")
		// The TypeMeta of an object is in the envelope.
		if len(protobuf) < 2 || names[0] == "-" {
			continue
		}
		number, err := strconv.Atoi(protobuf[1])
		if err != nil {
			log.Fatalf("%s.%s: %v", typeName(t), f.Name, err)
		}
		field := Field{Number: number, Name: names[0]}
		// encoding/json never takes a struct for empty.
		mayBeEmpty := f.Type.Kind() != reflect.Struct && slices.Contains(names, "omitempty")
		field.Omit = mayBeEmpty || slices.Contains(names, "omitzero")
		if field.Name == "" && !slices.Contains(names, "inline") {
			log.Fatalf("%s.%s: no JSON name", typeName(t), f.Name)
		}
		g.setType(&field, f.Type)
		all = append(all, field)
	}
	return all
}

// setType sets the type, the shape and the pointer.
func (g *generator) setType(field *Field, t reflect.Type) {
	if t.Kind() == reflect.Pointer {
		field.Pointer = true
		t = t.Elem()
	}
	if t.Kind() == reflect.Map {
		if t.Key().Kind() != reflect.String {
			log.Fatalf("%s: a map with keys that are not strings", field.Name)
		}
		field.Shape, t = "map", t.Elem()
	} else if t.Kind() == reflect.Slice && t.Elem().Kind() != reflect.Uint8 && !isMessage(t) {
		field.Shape, t = "list", t.Elem()
	}
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	field.Kind = g.kinds[t]
	field.Type = g.typeOf(t)
}

func isMessage(t reflect.Type) bool {
	_, ok := reflect.PointerTo(t).MethodByName("Unmarshal")
	return ok
}

func (g *generator) typeOf(t reflect.Type) string {
	if code, ok := own[typeName(t)]; ok {
		return code
	}
	if _, ok := reflect.PointerTo(t).MethodByName("MarshalJSON"); ok {
		log.Fatalf("%s has JSON of its own", typeName(t))
	}
	switch t.Kind() {
	case reflect.String:
		return "s"
	case reflect.Bool:
		return "b"
	case reflect.Int, reflect.Int32, reflect.Int64:
		return "i"
	case reflect.Struct:
		return g.message(t)
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Uint8 {
			return "y"
		}
		// A list with a name, such as ExtraValue, is a message with the elements as field 1, and in JSON a list.
		if isMessage(t) && t.Elem().Kind() == reflect.String {
			return "L"
		}
	}
	log.Fatalf("%s: a type that is not expected", t)
	return ""
}

func main() {
	log.SetFlags(0)
	g := generator{
		table: Table{Kinds: map[string]string{}, Types: map[string][]Field{}},
		seen:  map[string]bool{},
		kinds: map[reflect.Type]string{},
	}
	vectors := map[string][]Vector{}
	read(os.Args[1], &g.table)
	read(os.Args[2], &vectors)
	scheme := runtime.NewScheme()
	for _, add := range groups {
		if err := add(scheme); err != nil {
			log.Fatal(err)
		}
	}
	for gvk, t := range scheme.AllKnownTypes() {
		meta, ok := t.FieldByName("ObjectMeta")
		// A JobTemplate is never an object of its own.
		if ok && gvk.Kind != "JobTemplate" && typeName(meta.Type) == "k8s.io/apimachinery/pkg/apis/meta/v1.ObjectMeta" {
			apiVersion, kind := gvk.ToAPIVersionAndKind()
			g.kinds[t] = apiVersion + "/" + kind
		}
	}
	for t, name := range g.kinds {
		g.table.Kinds[name] = g.message(t)
		vectors[name] = nil
		for variant := range 3 {
			f := filler{kinds: g.kinds, variant: variant}
			vectors[name] = append(vectors[name], f.vector(t))
		}
	}
	write(os.Args[1], g.table)
	write(os.Args[2], vectors)
}

func read(path string, value any) {
	content, err := os.ReadFile(path)
	if err == nil && len(content) > 0 {
		err = json.Unmarshal(content, value)
	}
	if err != nil {
		log.Fatal(err)
	}
}

func write(path string, value any) {
	content, err := json.Marshal(value)
	if err == nil {
		err = os.WriteFile(path, content, 0o600)
	}
	if err != nil {
		log.Fatal(err)
	}
}

// Vector is an object as it is stored, and its JSON.
type Vector struct {
	Stored []byte
	JSON   json.RawMessage
}

// filler makes values: with every field (variant 0), with every pointer to a zero value (1), with nothing (2).
type filler struct {
	kinds   map[reflect.Type]string
	variant int
	n       int64
}

func (f *filler) vector(t reflect.Type) Vector {
	value := reflect.New(t)
	if f.variant < 2 {
		f.fill(value.Elem())
	}
	f.setKind(value.Elem())
	raw, err := value.Interface().(interface{ Marshal() ([]byte, error) }).Marshal()
	if err != nil {
		log.Fatal(err)
	}
	name := f.kinds[t]
	slash := strings.LastIndex(name, "/")
	meta := runtime.TypeMeta{APIVersion: name[:slash], Kind: name[slash+1:]}
	unknown := runtime.Unknown{TypeMeta: meta, Raw: raw}
	stored, err := unknown.Marshal()
	if err != nil {
		log.Fatal(err)
	}
	text, err := json.Marshal(value.Interface())
	if err != nil {
		log.Fatal(err)
	}
	return Vector{Stored: append([]byte("k8s\x00"), stored...), JSON: text}
}

// setKind sets the API version and the kind of an object.
func (f *filler) setKind(value reflect.Value) {
	name, ok := f.kinds[value.Type()]
	if !ok {
		return
	}
	slash := strings.LastIndex(name, "/")
	value.FieldByName("APIVersion").SetString(name[:slash])
	value.FieldByName("Kind").SetString(name[slash+1:])
}

func (f *filler) fill(value reflect.Value) {
	f.n++
	t := value.Type()
	switch own[typeName(t)] {
	case "T":
		value.FieldByName("Time").Set(reflect.ValueOf(time.Unix(1700000000+f.n, 0).UTC()))
		return
	case "M":
		value.FieldByName("Time").Set(reflect.ValueOf(time.Unix(1700000000, f.n*1000).UTC()))
		return
	case "J":
		value.FieldByName("Raw").SetBytes([]byte(`{"f:a":[1,null,"b"]}`))
		return
	case "Q":
		value.Set(reflect.ValueOf(resource.MustParse(strconv.FormatInt(f.n, 10) + "500m")))
		return
	case "I":
		if f.n%2 == 0 {
			value.Set(reflect.ValueOf(intstr.FromString("50%")))
		} else {
			value.Set(reflect.ValueOf(intstr.IntOrString{IntVal: -int32(f.n)}))
		}
		return
	}
	switch t.Kind() {
	case reflect.Pointer:
		value.Set(reflect.New(t.Elem()))
		if f.variant == 0 {
			f.fill(value.Elem())
		}
	case reflect.Struct:
		for i := range t.NumField() {
			if t.Field(i).Tag.Get("protobuf") != "" {
				f.fill(value.Field(i))
			}
		}
		f.setKind(value)
	}
	if f.variant != 0 {
		return
	}
	switch t.Kind() {
	case reflect.String:
		value.SetString("täxt " + strconv.FormatInt(f.n, 10))
	case reflect.Bool:
		value.SetBool(true)
	case reflect.Int, reflect.Int32, reflect.Int64:
		value.SetInt(f.n * (1 - f.n%3))
	case reflect.Slice:
		if t.Elem().Kind() == reflect.Uint8 {
			value.SetBytes([]byte{0, 255, byte(f.n)})
			return
		}
		value.Set(reflect.MakeSlice(t, 2, 2))
		f.fill(value.Index(0))
		// The second element has no field.
		f.setKind(value.Index(1))
		if t.Elem().Kind() == reflect.Pointer {
			f.fill(value.Index(1))
		}
	case reflect.Map:
		value.Set(reflect.MakeMap(t))
		key, element := reflect.New(t.Key()).Elem(), reflect.New(t.Elem()).Elem()
		f.fill(key)
		f.fill(element)
		value.SetMapIndex(key, element)
	}
}
